"""The log never blocks the server, whatever reads it."""

import io
import logging
import os
import subprocess
import sys

import pytest

from kvweave.server.logs import QueuedStream


@pytest.fixture
def logger():
    logger = logging.getLogger("kvweave.tests.log_stream")
    logger.propagate = False
    logger.setLevel("INFO")
    yield logger
    logger.handlers.clear()


def test_lines_are_written_in_order(logger):
    stream = io.StringIO()
    handler = QueuedStream(stream)
    logger.addHandler(handler)
    for number in range(100):
        logger.info("line %d", number)
    handler.flush()
    assert stream.getvalue() == "".join(f"line {number}\n" for number in range(100))


def test_a_reader_who_stops_holds_up_nobody_and_hears_what_was_lost(logger):
    read, write = os.pipe()
    with os.fdopen(read, "rb") as reader, os.fdopen(write, "w") as stream:
        handler = QueuedStream(stream, max_lines=50)
        logger.addHandler(handler)
        for _ in range(500):  # far more than a pipe and the queue hold
            logger.info("%s", "x" * 2000)
        text = b""
        while b"lines of this log are lost" not in text:
            text += reader.read1(1 << 16)
            if b"\n" in text[-10:]:
                logger.info("still here")


@pytest.mark.parametrize("what", ["full", "closed", "broken", "none"])
def test_a_stream_that_takes_nothing_costs_nobody_anything(logger, what):
    if what == "full":
        stream = open("/dev/full", "w")  # noqa: SIM115
    elif what == "broken":
        read, write = os.pipe()
        os.close(read)
        stream = os.fdopen(write, "w")
    else:
        stream = io.StringIO()
        if what == "closed":
            stream.close()
    handler = QueuedStream(stream)
    if what == "none":
        handler._stream = None
    logger.addHandler(handler)
    for _ in range(3):
        logger.info("said")
        handler.flush()
    assert not handler._waiting.unfinished_tasks, "its thread has died"


def test_at_the_end_all_is_written_and_a_reader_who_stopped_is_not_waited_for():
    script = (
        "import logging, sys\n"
        "from kvweave.server.logs import QueuedStream\n"
        "logging.basicConfig(level='INFO', format='%(message)s', handlers=[QueuedStream()])\n"
        "for n in range(int(sys.argv[1])): logging.info('%5d' + 'x' * 1000, n)\n"
    )

    def run(lines):
        return subprocess.Popen(
            [sys.executable, "-c", script, str(lines)], stderr=subprocess.PIPE, text=True
        )

    with run(1000) as process:
        _, said = process.communicate(timeout=60)
        assert process.returncode == 0
        assert [int(line[:5]) for line in said.splitlines()] == list(range(1000))
    with run(1000) as process:  # whose pipe stays full
        assert process.wait(60) == 0
