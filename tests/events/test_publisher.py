"""Publisher and follower over real sockets: order, losses, replays and restarts."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import zmq

from kvweave.config.cache import EventsConfig
from kvweave.errors import ConfigError
from kvweave.events import follower as following
from kvweave.events import publisher as publishing
from kvweave.events.follower import EventFollower
from kvweave.events.publisher import ZmqPublisher, decode_batch, encode_batch
from kvweave.prefix.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent

ANYWHERE = "tcp://127.0.0.1:0"
Open = Callable[..., ZmqPublisher]


@pytest.fixture
def open_publisher() -> Iterator[Open]:
    opened: list[ZmqPublisher] = []

    def open_one(**settings) -> ZmqPublisher:
        settings = {"endpoint": ANYWHERE, "bind": True, "replay_endpoint": ANYWHERE, **settings}
        opened.append(ZmqPublisher(EventsConfig(**settings)))
        return opened[-1]

    yield open_one
    for each in opened:
        each.close()


@pytest.fixture
def subscribe() -> Iterator[Callable[..., zmq.Socket[bytes]]]:
    sockets: list[zmq.Socket[bytes]] = []

    def connected(publisher: ZmqPublisher, topic: bytes = b"", hwm: int = 0) -> zmq.Socket[bytes]:
        """A connected subscriber: publishes until it receives a batch."""
        listening = zmq.Context.instance().socket(zmq.SUB)
        sockets.append(listening)
        listening.set_hwm(hwm)
        listening.rcvtimeo = 10_000
        listening.subscribe(topic)
        listening.connect(publisher.endpoint)
        while not listening.poll(20):
            publisher.publish([AllBlocksCleared()])
        while listening.poll(100):
            listening.recv_multipart()
        return listening

    yield connected
    for each in sockets:
        each.close(linger=0)


def stored(*hashes: int, parent: int | None = None, tokens: int = 1) -> BlockStored:
    return BlockStored(hashes, parent, tuple(range(tokens * len(hashes))), tokens)


def ask(publisher: ZmqPublisher, first: int) -> list[tuple[bytes, int, list[KVEvent]]]:
    """Topic, number and events of all batches that are replayed."""
    dealer = zmq.Context.instance().socket(zmq.DEALER)
    dealer.rcvtimeo = 10_000
    dealer.connect(publisher.replay_endpoint)
    dealer.send_multipart((b"", first.to_bytes(8, "big")))
    found = []
    while True:
        empty, topic, number, payload = dealer.recv_multipart()
        assert empty == b""
        if int.from_bytes(number, "big", signed=True) == -1:
            assert (topic, payload) == (b"", b"")
            dealer.close(linger=0)
            return found
        found.append((topic, int.from_bytes(number, "big"), decode_batch(payload).events))


def until(follower: EventFollower, done: Callable[[list[KVEvent]], bool]) -> list[KVEvent]:
    """Drain until `done` is satisfied with all events so far."""
    events: list[KVEvent] = []
    deadline = time.monotonic() + 20
    while not done(events):
        assert time.monotonic() < deadline, events
        follower.wait(0.05)
        events += follower.drain()
    return events


def test_a_message_is_topic_number_and_payload(open_publisher, subscribe):
    publisher = open_publisher(topic="kv@here")
    listening = subscribe(publisher, b"kv@")
    before = publisher.published
    publisher.publish([stored(7), BlockRemoved((3,))])
    publisher.publish([stored(8, parent=7)])
    for expected, events in ((before, [stored(7), BlockRemoved((3,))]), (before + 1, None)):
        topic, number, payload = listening.recv_multipart()
        assert (topic, len(number)) == (b"kv@here", 8)
        assert int.from_bytes(number, "big") == expected
        batch = decode_batch(payload)
        assert events is None or batch.events == events
        assert abs(batch.time - time.time()) < 60


def test_kept_batches_are_replayed(open_publisher):
    publisher = open_publisher(buffer_steps=3, topic="t")
    for name in range(5):
        publisher.publish([stored(name)])
    wanted = [(b"t", name, [stored(name)]) for name in (2, 3, 4)]
    assert ask(publisher, 0) == wanted
    assert ask(publisher, 4) == wanted[2:]
    assert ask(publisher, 5) == []


def test_a_malformed_replay_request_is_ignored(open_publisher):
    publisher = open_publisher()
    dealer = zmq.Context.instance().socket(zmq.DEALER)
    dealer.connect(publisher.replay_endpoint)
    for frames in ((b"",), (b"", b"short"), (b"12345678",), (b"", b"a", b"12345678")):
        dealer.send_multipart(frames)
    publisher.publish([stored(1)])
    assert ask(publisher, 0) == [(b"", 0, [stored(1)])]
    assert not dealer.poll(0)
    dealer.close(linger=0)


def test_a_slow_subscriber_blocks_nobody_and_can_catch_up(open_publisher, subscribe):
    publisher = open_publisher(hwm=1)
    slow = subscribe(publisher, hwm=1)
    first = publisher.published
    for at in range(300):  # far more than sockets and pipes hold
        publisher.publish([stored(at, tokens=20_000)])
    replayed = {number: events for _, number, events in ask(publisher, first)}
    numbers = []
    while slow.poll(200):
        numbers.append(int.from_bytes(slow.recv_multipart()[1], "big"))
    assert len(numbers) < 300
    assert len(replayed) == 300
    assert all(replayed[first + at][0].block_hashes == (at,) for at in range(300))


def test_batches_beyond_the_queue_are_dropped_counted_and_leave_a_gap(
    open_publisher, monkeypatch, caplog
):
    publisher = open_publisher(max_queue_size=2)
    encode, go_on, stuck = publishing.encode_batch, threading.Event(), threading.Event()

    def slowly(*arguments):
        stuck.set()
        assert go_on.wait(20)
        return encode(*arguments)

    monkeypatch.setattr(publishing, "encode_batch", slowly)
    publisher.publish([stored(0)])
    assert stuck.wait(20)
    with caplog.at_level(logging.WARNING):
        for name in range(1, 6):
            publisher.publish([stored(name)])  # returns although the thread stands still
    assert (publisher.dropped, publisher.published) == (3, 6)
    assert len(caplog.messages) == 1
    go_on.set()
    while ask(publisher, 2) == []:
        pass
    publisher.publish([stored(6)])
    follower = EventFollower(publisher.endpoint, publisher.replay_endpoint)
    kept = [stored(0), stored(1), stored(2), AllBlocksCleared(), stored(6)]
    assert until(follower, lambda events: len(events) == 5) == kept
    follower.close()


def test_after_a_failed_thread_batches_are_counted_and_not_kept(open_publisher, monkeypatch):
    publisher = open_publisher()
    monkeypatch.setattr(publishing, "encode_batch", lambda *_: 1 / 0)
    publisher.publish([stored(0)])
    publisher._thread.join(20)
    for name in range(5):
        publisher.publish([stored(name)])
    assert (publisher.dropped, publisher.published) == (5, 6)
    assert not publisher._waiting


def test_a_salt_that_utf8_cannot_encode_is_published(open_publisher):
    publisher = open_publisher()
    publisher.publish([BlockStored((1,), None, (5,), 1, "a\ud800")])
    publisher.publish([stored(2)])
    odd, plain = [event for _, _, [event] in ask(publisher, 0)]
    assert (odd.salt, plain) == ("a\\ud800", stored(2))


def test_a_late_follower_keeps_a_bounded_queue_and_loses_nothing(open_publisher, monkeypatch):
    """An idle router does not drain while its replicas serve other routers' requests."""
    publisher = open_publisher(hwm=50)
    with monkeypatch.context() as small:
        small.setattr(following, "_MOST_MESSAGES", 2)
        late = EventFollower(publisher.endpoint, publisher.replay_endpoint)
    while not late._live.poll(20):
        publisher.publish([AllBlocksCleared()])
    while late.wait(0.1):
        late.drain()
    wanted: list[KVEvent] = [stored(name, tokens=20_000) for name in range(300)]
    for event in wanted:  # far more than sockets and pipes hold
        publisher.publish([event])
    while publisher._waiting:
        time.sleep(0.01)
    time.sleep(0.2)
    kept = late.drain()
    assert len(kept) < 250
    publisher.publish([stored(999)])
    assert kept + until(late, lambda events: stored(999) in events) == [*wanted, stored(999)]
    late.close()


def test_an_address_open_to_other_machines_logs_a_warning(open_publisher, caplog):
    open_publisher()
    assert not caplog.messages
    replayed = open_publisher(replay_endpoint="tcp://0.0.0.0:0").replay_endpoint
    assert [f"anyone who reaches {replayed}" in said for said in caplog.messages] == [True]


def test_closing_sends_waiting_batches(open_publisher, subscribe):
    publisher = open_publisher()
    listening = subscribe(publisher)
    first = publisher.published
    for name in range(50):
        publisher.publish([stored(name)])
    publisher.close()
    publisher.close()
    numbers = [int.from_bytes(listening.recv_multipart()[1], "big") for _ in range(50)]
    assert numbers == list(range(first, first + 50))


def test_a_follower_that_starts_late_gets_earlier_batches(open_publisher):
    publisher = open_publisher()
    for name in range(40):
        publisher.publish([stored(name)])
    follower = EventFollower(publisher.endpoint, publisher.replay_endpoint)
    until(follower, lambda events: events == [stored(name) for name in range(40)])
    publisher.publish([BlockRemoved((0,))])  # it may be heard, or be asked for with the next
    publisher.publish([BlockRemoved((1,))])

    def heard(events: list[KVEvent]) -> bool:
        publisher.publish([stored(99)])
        return [event for event in events if event != stored(99)] == [
            BlockRemoved((0,)),
            BlockRemoved((1,)),
        ]

    assert AllBlocksCleared() not in until(follower, heard)
    follower.close()


def test_a_follower_clears_its_state_after_lost_batches(open_publisher):
    publisher = open_publisher(buffer_steps=2)
    for name in range(5):
        publisher.publish([stored(name)])
    follower = EventFollower(publisher.endpoint, publisher.replay_endpoint)
    events = until(follower, lambda events: len(events) >= 3)
    assert events == [AllBlocksCleared(), stored(3), stored(4)]
    follower.close()


@pytest.mark.parametrize("replay", [True, False])
def test_a_follower_notices_a_restart_of_the_publisher(open_publisher, replay):
    first = open_publisher(**({} if replay else {"replay_endpoint": None}))
    endpoint, again = first.endpoint, first.replay_endpoint
    follower = EventFollower(endpoint, again)

    def told(publisher: ZmqPublisher, name: int) -> Callable[[list[KVEvent]], bool]:
        def heard(events: list[KVEvent]) -> bool:
            publisher.publish([stored(name)])
            return stored(name) in events

        return heard

    for _ in range(50):
        first.publish([stored(1)])
    until(follower, told(first, 1))
    first.close()
    second = None
    while second is None:  # the address is free again a moment after its socket is closed
        with contextlib.suppress(ConfigError):
            second = open_publisher(endpoint=endpoint, replay_endpoint=again)
    second.publish([stored(2)])
    events = until(follower, told(second, 3))
    assert AllBlocksCleared() in events
    new = events[len(events) - events[::-1].index(AllBlocksCleared()) :]
    assert stored(1) not in new
    assert (stored(2) in new) or not replay
    follower.close()


def test_a_loss_right_after_a_replay_is_requested_again():
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    live, router = context.socket(zmq.XPUB), context.socket(zmq.ROUTER)
    ports = [each.bind_to_random_port("tcp://127.0.0.1") for each in (live, router)]
    follower = EventFollower(*(f"tcp://127.0.0.1:{port}" for port in ports))
    live.recv()

    def answer(*numbers: int) -> None:
        client, *_ = router.recv_multipart()
        for number in numbers:
            payload = encode_batch([stored(number)], number + 1.0)
            router.send_multipart((client, b"", b"", number.to_bytes(8, "big"), payload))
        router.send_multipart((client, b"", b"", publishing.LAST, b""))

    answer()  # there was nothing yet
    assert follower.wait(20)
    assert follower.drain() == []
    live.send_multipart((b"", (2).to_bytes(8, "big"), encode_batch([stored(2)], 3.0)))
    assert follower.wait(20)
    assert follower.drain() == []
    answer(0, 1)
    assert until(follower, lambda events: stored(2) in events) == [stored(0), stored(1), stored(2)]
    for each in (follower, live, router):
        each.close()


def test_an_unreadable_batch_clears_the_state_and_nothing_else():
    socket = zmq.Context.instance().socket(zmq.XPUB)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    follower = EventFollower(f"tcp://127.0.0.1:{port}")
    socket.recv()  # the subscription is here: nothing that is sent now gets lost
    payloads = [encode_batch([stored(1)], 5.0), b"\xc1", encode_batch([stored(2)], 6.0)]
    for number, payload in enumerate(payloads):
        socket.send_multipart((b"", number.to_bytes(8, "big"), payload))
    events = until(follower, lambda events: stored(2) in events)
    assert events == [stored(1), AllBlocksCleared(), stored(2)]
    follower.close()
    socket.close(linger=0)


def test_an_address_in_use_is_refused_with_the_reason(open_publisher):
    taken = open_publisher()
    with pytest.raises(ConfigError, match=r"cannot bind tcp://127.0.0.1:\d+: Address already"):
        open_publisher(endpoint=taken.endpoint)
    with pytest.raises(ConfigError, match="cannot bind ipc:///nowhere/at/all"):
        open_publisher(replay_endpoint="ipc:///nowhere/at/all")
