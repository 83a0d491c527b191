"""Malformed HTTP and JSON: refused in words while the connection is open."""

import gzip
import json
import random
import time
import zlib

import pytest

from support.rawkit import Wire, head, request
from support.serverkit import eventually

BODY = {"prompt": "x", "max_tokens": 2}


@pytest.fixture
def raw(server):
    with Wire(server) as raw:
        yield raw


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
        (b"POST /health\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\n\r\n", 400),  # nobody named the host
        (b"GET /health HTTP/1.1\r\nHost: x\r\nno colon\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: x\r\nA: \x00\r\n\r\n", 400),
        (head(content_length="-1"), 400),
        (head(content_length="nine"), 400),
        (head(content_length="9" * 19), 413),
        (head(content_length="9" * 40), 400),
        (head(content_length="5", transfer_encoding="chunked") + b"0\r\n\r\n", 400),
        (head(content_length="5, 6"), 400),
        (head(transfer_encoding="gzip"), 501),
        (head(transfer_encoding="chunked") + b"zz\r\n", 400),
        (head(transfer_encoding="chunked") + b"5\r\n{}xxx", 400),
        (head("/" + "x" * 20_000, "GET")[:-2], 431),
        (head("/health", "GET", big="x" * 20_000)[:-2], 431),
        (head("/health", "GET", **{f"h{n}": n for n in range(5000)})[:-2], 431),
    ],
)
def test_malformed_requests_are_refused_in_words(raw, client, sent, status):
    raw.send(sent)
    if status == 400 and b"chunked\r\n\r\n5" in sent:
        raw.send(b"xxxx")
    assert raw.refusal(status)
    assert client.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 19_000 + b"1" + b"}" * 500, "nested too deeply"),
        (b'{"prompt": "x", "n": ' + b"1" * 4000 + b"}", "n must be between"),
        (b'{"prompt": "x", "n": ' + b"1" * 90_000 + b"}", "number too long"),
        (b'{"prompt": "x", "temperature": ' + b"1" * 4000 + b"}", "temperature"),
        (b'{"prompt": "x", "fuzzy_refresh": ' + b"1" * 4000 + b"}", "fuzzy_refresh"),
        (b'{"prompt": "x", "priority": -' + b"1" * 4000 + b"}", "priority"),
        (b'{"prompt": "x", "logit_bias": {"1": ' + b"1" * 4000 + b"}}", "logit_bias"),
        (b'{"prompt": [' + b"1" * 4000 + b"]}", "outside 0 to"),
        (b'{"prompt": "x", "temperature": 1e999}', "finite"),
        (b'{"prompt": "x", "temperature": NaN}', "finite"),
        (b'{"prompt": "x", "max_tokens": -Infinity}', "max_tokens"),
        (b'{"prompt": "x", "seed": 1e308}', "seed"),
        (b'{"prompt": "\\ud800"}', "surrogate"),
        (b'{"prompt": "x", "stop": "\\udfff\\ud800"}', "surrogate"),
        (b'{"prompt": "x", "cache_salt": "\\ud800"}', "surrogate"),
        (b'{"prompt": "x", "model": "\\ud800"}', "no model"),
        (b'{"prompt": "x", "logit_bias": {"\\ud800": 1}}', "is no id"),
        (b'{"prompt": "\x00"}', "JSON"),
        (b'{"prompt": "x"} {"prompt": "y"}', "JSON"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_json_that_cannot_be_meant(raw, engine, body, words, stream):
    body = body.replace(b'{"prompt"', b'{"stream": true, "prompt"', 1) if stream else body
    raw.send(head(content_length=len(body), content_type="application/json") + body)
    assert words in raw.refusal(400 if "no model" not in words else 404)
    assert not engine.requests


@pytest.mark.parametrize("coding", ["utf-8-sig", "utf-16", "utf-16-be", "utf-32-le"])
def test_json_in_another_unicode_coding_is_read(raw, coding):
    body = json.dumps({**BODY, "prompt": "é"}, ensure_ascii=False).encode(coding)
    raw.send(head(content_length=len(body)) + body)
    assert raw.text() == "Th"


@pytest.mark.parametrize(
    "more",
    [
        {"messages": [{"role": "user", "content": [{"type": "\ud800\n", "text": "x"}]}]},
        {"messages": [{"role": "\ud800", "content": "x"}]},
        {"reorder": {"\ud800": 1, "a\nb": 2}},
        {"chat_template_kwargs": {"\ud800": 1, "tokenize": 2}},
        {"tools": [{"\ud800": "\udfff"}]},
        {"tools": [{"deep": json.loads("[" * 900 + "]" * 900)}]},
        {"model": "\ud800"},
    ],
)
def test_refusals_that_quote_what_cannot_be_written(raw, more):
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, **more}
    raw.send(request(body, "/v1/chat/completions"))
    answer = raw.reply()
    assert answer.status in (200, 400, 404), answer.body
    if answer.status != 200:
        assert "\n" not in answer.json()["error"]["message"]


def test_of_two_fields_of_one_name_the_last_one_counts(raw, engine):
    body = b'{"prompt": "x", "max_tokens": 1, "max_tokens": 3}'
    raw.send(head(content_length=len(body)) + body)
    assert raw.text() == "The"


@pytest.mark.parametrize("kind", ["text/plain", "multipart/form-data", "application/xml", "\xff"])
def test_a_body_of_another_type_is_not_read(raw, kind):
    raw.send(request(BODY, content_type=kind))
    assert "application/json" in raw.refusal(400)


@pytest.mark.parametrize(
    ("coding", "pack"),
    [("gzip", gzip.compress), ("GZIP", gzip.compress), ("deflate", zlib.compress), ("br", bytes)],
)
def test_a_compressed_body_is_refused_whatever_it_would_become(raw, coding, pack):
    bomb = pack(b"0" * 2**24)[:50_000]
    raw.send(head(content_length=len(bomb), content_encoding=coding) + bomb)
    assert f"content-encoding {coding}" in raw.refusal(415)
    raw.send(request(BODY, content_encoding="identity"))  # and the connection goes on
    assert raw.text() == "Th"


def test_whoever_sends_on_after_the_refusal_still_reads_it(server, raw):
    raw.send(head(transfer_encoding="chunked"))
    for _ in range(200):  # twice the limit
        raw.send(b"400\r\n" + b"x" * 0x400 + b"\r\n")
    assert "100000 bytes" in raw.refusal(413)
    raw.send(b"0\r\n\r\n" + request(BODY))
    assert raw.text() == "Th"


def test_a_body_announced_too_large_is_not_asked_for(raw):
    raw.send(head(content_length=10**9, expect="100-continue"))
    assert raw.refusal(413)  # and no 100 before it


def test_requests_sent_at_once_are_answered_in_order(raw, engine):
    engine.step_seconds = 0.01
    lengths = [5, 1, 3]
    raw.send(b"".join(request({**BODY, "max_tokens": length}) for length in lengths))
    assert [len(raw.text()) for _ in lengths] == lengths


def test_who_sends_requests_at_once_and_leaves_is_noticed_at_the_latest_when_answered(raw, engine):
    engine.hold = "decode"
    raw.send(request(BODY) * 50)
    assert eventually(lambda: "decode" in engine.phases.values())
    raw.close()
    engine.hold = None
    assert eventually(lambda: not engine.phases)
    time.sleep(0.05)
    assert len(engine.requests) < 10, "fifty answers were made for nobody"


def test_who_closes_its_sending_side_has_left(raw, engine):
    engine.hold = "decode"
    raw.send(request({**BODY, "stream": True}))
    assert eventually(lambda: "decode" in engine.phases.values())
    raw.end()
    assert eventually(lambda: not engine.phases)
    assert raw.is_closed()


def test_garbage_in_the_middle_of_an_answer_ends_the_connection(raw, client, engine):
    engine.hold = "decode"
    raw.send(head(transfer_encoding="chunked") + b"20\r\n" + json.dumps(BODY).encode() + b"\r\n")
    raw.send(b"0\r\n\r\nneither chunk nor request\r\n\r\n")
    assert eventually(lambda: "decode" in engine.phases.values())
    engine.hold = None
    raw.reply()
    assert "no valid HTTP" in raw.refusal(400)
    assert client.get("/health").status_code == 200


def test_random_bytes_and_random_cuts_of_requests(server, client, engine, caplog):
    choose = random.Random(5)
    whole = request(BODY)
    for _ in range(150):
        sent = bytearray(whole)
        for _ in range(choose.randrange(1, 6)):
            sent[choose.randrange(len(sent))] = choose.randrange(256)
        with Wire(server) as raw:
            raw.send(sent[: choose.randrange(1, len(sent) + 1)])
            if choose.random() < 0.5:
                raw.end()
                raw.is_closed()
    assert client.get("/health").status_code == 200
    assert eventually(lambda: not engine.phases)
    assert not [record for record in caplog.records if record.exc_info], "it was not foreseen"
