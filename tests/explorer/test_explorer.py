"""The explorer's API: maps, donors, the tree, reasons, and hidden text."""

import pytest

from kvweave.config import ServerConfig
from kvweave.plugins import BACKENDS
from kvweave.prefix.contract import Declined
from support.explorerkit import DOCUMENT, PAGE, ask, explored, look
from support.serverkit import FakeEngine, RunningServer, eventually

SECRET = "the vault opens at dusk "


@pytest.fixture(scope="module")
def client():
    """Shared: prompts only ever come in addition, and caches are told apart by salts."""
    with explored() as client:
        yield client


def newest(client):
    return look(client, "overview")["prompts"][-1]["number"]


def test_a_map_covers_every_token_once_and_names_the_donor_and_both_positions(client):
    ask(client, f"Read: {DOCUMENT}", cache_salt="map")
    donor = newest(client)
    prompt = f"You are a porter. {DOCUMENT} When does it leave?"
    ask(client, prompt, cache_salt="map")
    found = look(client, f"prompts/{newest(client)}")
    reached = 0
    for block in found["blocks"]:
        assert block["start"] == reached
        assert len(block["tokens"]) == block["length"]
        reached += block["length"]
    assert reached == found["prompt_tokens"] == len(prompt)
    assert "".join(text for block in found["blocks"] for text in block["tokens"]) == prompt
    [moved] = [block for block in found["blocks"] if block["source"] == "moved"]
    assert moved["donor"] == donor
    assert prompt[moved["start"] :][:60] == f"Read: {DOCUMENT}"[moved["donor_start"] :][:60]
    assert sum(found["counts"].values()) == len(prompt)
    assert found["counts"]["moved"] == moved["length"] > 100
    assert found["answer"]["length"] == len(found["answer"]["tokens"]) == 4


def test_an_exact_prefix_names_whom_it_is_shared_with(client):
    ask(client, DOCUMENT, cache_salt="exact")
    donor = newest(client)
    ask(client, DOCUMENT, cache_salt="exact")
    first = look(client, f"prompts/{newest(client)}")["blocks"][0]
    assert (first["source"], first["donor"], first["donor_start"]) == ("exact", donor, 0)


def test_the_overview_tells_only_news_and_counts_by_source(client):
    ask(client, "Something new", cache_salt="news")
    seen = newest(client)
    ask(client, "Something newer", cache_salt="news", rid="newer")
    news = look(client, f"overview?after={seen}")
    assert [prompt["rid"] for prompt in news["prompts"]] == ["newer"]
    assert news["prompts"][0]["first_token_ms"] > 0
    assert news["prompts"][0]["namespace"] not in (None, "news")
    for prompt in look(client, "overview")["prompts"]:
        assert sum(prompt["counts"].values()) == prompt["prompt_tokens"]


def test_entries_begin_where_a_prompt_differs_from_the_one_before():
    with explored() as client:
        for text in ("Dear reader, one", "Dear reader, two", "Dear reader, two"):
            ask(client, text)
        beginnings = [each["beginning"] for each in look(client, "overview")["prompts"]]
        assert beginnings == ["Dear reader, one", "two", "Dear reader, two"]
    with explored(explorer_hide_text=True) as client:
        ask(client, "secret")
        assert "beginning" not in look(client, "overview")["prompts"][0]


@pytest.mark.parametrize(
    ("before", "prompt", "more", "gate"),
    [
        ("Tell me. " + DOCUMENT, "What? " + DOCUMENT, {"fuzzy": False}, "exact-only"),
        ("Tell me. " + DOCUMENT, "What? " + DOCUMENT, {"cache_salt": "other"}, "salt"),
        ("So. " + DOCUMENT[:22], "Then: " + DOCUMENT[:22] + "?" * 30, {}, "min-span"),
        ("x" * 8 + DOCUMENT[:60], "?" * 700 + DOCUMENT[:60] + "!" * 20, {}, "min-reuse"),
        ("x" * 6 + DOCUMENT[:36], "y" * 20 + DOCUMENT[:36], {}, "edges"),
    ],
)
def test_why_not_names_the_gate(before, prompt, more, gate):
    with explored() as client:
        ask(client, before)
        ask(client, prompt, **more)
        found = look(client, "prompts/2/why-not")
        assert found["compared"] == 1
        longest = found["runs"][0]
        assert longest["gate"] == gate
        assert longest["donor"] == 1
        assert prompt[longest["start"] :].startswith(longest["excerpt"])
        assert before[longest["donor_start"] :].startswith(longest["excerpt"])


@pytest.mark.parametrize("hidden", [False, True])
def test_why_not_knows_what_was_refused_in_other_words(hidden):
    with explored(explorer_hide_text=hidden) as client:
        ask(client, "One. " + DOCUMENT)
        prompt = "Read this: " + DOCUMENT + " It costs 20 a day."
        ask(client, prompt, rid="words")
        begin = prompt.index(" It costs")
        moved = prompt.index(DOCUMENT) + 8
        client.cache.paraphrases.latest_declined += [
            Declined("words", begin, len(prompt), "facts", "20 is not 30"),
            Declined("words", begin, len(prompt), "gone", "the next best is not there"),
            Declined("words", moved, moved + 4, "facts", "something was served there"),
            Declined("others", 0, 8, "facts", "somebody else asked"),
        ]
        [found] = look(client, "prompts/2/why-not")["other_words"]
        assert (found["start"], found["length"], found["gate"]) == (begin, 19, "facts")
        shown = {"reason": "20 is not 30", "excerpt": " It costs 20 a day."}
        assert {key: found[key] for key in shown if key in found} == ({} if hidden else shown)
        assert look(client, "prompts/1/why-not")["other_words"] == []


def test_why_not_knows_what_was_evicted_and_what_is_approximate():
    with explored() as client:
        ask(client, "One. " + DOCUMENT)
        ask(client, "Second: " + DOCUMENT + " And a long new ending that it had to compute itself")
        assert client.post("/flush_cache").status_code == 200
        ask(client, "A third: " + DOCUMENT)
        gates = [run["gate"] for run in look(client, "prompts/3/why-not")["runs"]]
        assert gates == ["evicted"]
        ask(client, "Fourth! And a long new ending that it had to compute itself, so it is")
        gates = [run["gate"] for run in look(client, "prompts/4/why-not")["runs"]]
        assert gates == ["approximate"]


@pytest.mark.parametrize("backend", list(BACKENDS))
def test_every_backend_says_what_it_has(backend):
    with explored(backend) as client:
        assert look(client, "overview")["backend"] == backend
        ask(client, "Here: " + DOCUMENT)
        ask(client, "Elsewhere: " + DOCUMENT)
        runs = look(client, "prompts/2/why-not")["runs"]
        gates = {"none": ["off"], "hash": ["position"], "radix": ["position"]}
        assert [run["gate"] for run in runs] == gates.get(backend, [])
        tree = look(client, "tree")["tree"]
        assert (tree is None) == (backend in ("none", "hash"))


def test_why_not_finds_nothing_where_nothing_is_shared(client):
    ask(client, "0123456789" * 3, cache_salt="alone")
    assert look(client, f"prompts/{newest(client)}/why-not")["runs"] == []


def test_the_tree_names_sizes_prompts_and_who_goes_first():
    with explored("radix") as client:
        ask(client, DOCUMENT[:64] + "a" * 32)
        ask(client, DOCUMENT[:64] + "b" * 32)
        ask(client, "c" * 48, cache_salt="s")
        tree = look(client, "tree")["tree"]
        nodes = {node["id"]: node for node in tree["nodes"]}
        assert tree["shown_tokens"] == tree["cached_tokens"] == tree["evictable_tokens"]
        assert tree["page_size"] == PAGE
        seen = set()
        for node in tree["nodes"]:
            assert node["parent"] is None or node["parent"] in seen, "children before parents"
            seen.add(node["id"])
        [shared] = [n for n in nodes.values() if n["head"].startswith("The ferry") and n["length"]]
        assert shared["prompts"] == [1, 2]
        assert (shared["length"], shared["children"], shared["goes"]) == (64, 2, None)
        leaves = sorted((n["goes"], n["prompts"]) for n in nodes.values() if n["goes"])
        assert leaves == [(1, [1]), (2, [2]), (3, [3])]
        salted = [n for n in nodes.values() if n["namespace"] is not None]
        assert {tuple(n["prompts"]) for n in salted} == {(3,)}


@pytest.mark.parametrize("how", [{"explorer_hide_text": True}, {"host": "0.0.0.0"}])
def test_hidden_text_is_nowhere_in_any_answer(how):
    with explored(**how) as client:
        ask(client, SECRET + DOCUMENT)
        ask(client, "x " + SECRET + DOCUMENT, fuzzy=False)
        assert look(client, "overview")["text_hidden"] is True
        replies = [
            client.get(f"/explorer/api/{path}")
            for path in ("overview", "prompts/1", "prompts/2", "prompts/2/why-not", "tree")
        ]
        for reply in replies:
            assert reply.status_code == 200
            for word in ("vault", "dusk", "ferry", '"tokens":["', '"head"', '"excerpt"'):
                assert word not in reply.text
        assert replies[2].json()["blocks"], "lengths and sources are still there"
        assert replies[3].json()["runs"][0]["length"] > 100


@pytest.mark.parametrize("keys", [{"api_key": "k"}, {"admin_api_key": "k"}])
def test_text_is_shown_under_any_name_with_a_key_only(keys):
    """tests/server/test_cross_origin.py has the names that a server without a key answers to."""
    headers = {"Host": "elsewhere.example:8000"}
    with explored(**keys) as client:
        ask(client, SECRET + DOCUMENT)
        for path in ("prompts/1", "tree"):
            reply = client.get(f"/explorer/api/{path}", headers=headers)
            assert "vault" in reply.text.replace('","', "")
            without = headers | {"Authorization": ""}
            assert client.get(f"/explorer/api/{path}", headers=without).status_code == 401


def test_an_open_server_hides_text_and_one_with_a_key_need_not():
    assert ServerConfig(host="0.0.0.0").hides_text
    assert not ServerConfig(host="0.0.0.0", api_key="k").hides_text
    assert not ServerConfig().hides_text
    assert ServerConfig(allowed_hosts="llm.example.com").hides_text, "a proxy may be in front"
    assert ServerConfig(api_key="k", explorer_hide_text=True).hides_text


def test_the_page_needs_no_key_and_its_data_does():
    config = ServerConfig(port=0, api_key="k")
    with RunningServer(FakeEngine(), config) as server, server.client() as client:
        for path in ("/explorer", "/explorer/static/app.js"):
            assert client.get(path).status_code == 200
        assert client.get("/").headers["location"] == "explorer", "the bare address leads there"
        for path in ("overview", "prompts/1", "prompts/1/why-not", "tree"):
            assert client.get(f"/explorer/api/{path}").status_code == 401
        assert client.get("/explorer/static/../api/overview").status_code == 401
        headers = {"Authorization": "Bearer k"}
        assert client.get("/explorer/api/overview", headers=headers).status_code == 200


def test_the_page_lets_only_its_own_files_run(client):
    for path in ("/explorer", "/explorer/static/app.js", "/explorer/static/base.css"):
        reply = client.get(path)
        policy = reply.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert reply.headers["x-content-type-options"] == "nosniff"
        tag = {"If-None-Match": reply.headers["etag"]}
        assert client.get(path, headers=tag).status_code == 304
    page = client.get("/explorer").text
    assert "http://" not in page
    assert "https://" not in page
    for name in ("nonesuch.js", "%2e%2e%2froutes.py", "..%2froutes.py"):
        assert client.get(f"/explorer/static/{name}").status_code == 404


def test_without_the_explorer_nothing_is_remembered_or_served():
    with RunningServer(FakeEngine(), ServerConfig(port=0, explorer=False)) as server:
        with server.client() as client:
            ask(client, "x")
            for path in ("/explorer", "/explorer/static/app.js", "/explorer/api/overview"):
                assert client.get(path).status_code == 404
        assert server.app.state.service.observer is None


def test_unknown_prompts_are_404_in_words(client):
    for path in ("prompts/0", "prompts/999999", "prompts/999999/why-not"):
        reply = client.get(f"/explorer/api/{path}")
        assert reply.status_code == 404
        assert "not remembered" in reply.json()["error"]["message"]
    for path in ("prompts/-1", "prompts/x", "prompts/99999999999999999999", "overview?after=x"):
        assert client.get(f"/explorer/api/{path}").status_code == 400


def test_live_prompts_are_told_with_their_phase():
    body = {"prompt": "hello", "rid": "live", "stream": True, "max_tokens": 5}
    with RunningServer(FakeEngine(), ServerConfig(port=0)) as server, server.client() as client:
        server.engine.hold = "decode"
        with client.stream("POST", "/v1/completions", json=body):
            [live] = look(client, "overview")["live"]
            assert (live["rid"], live["answering"], live["prompt_tokens"]) == ("live", True, 5)
            server.engine.hold = None
        assert eventually(lambda: not look(client, "overview")["live"])


def test_an_engine_that_is_busy_for_long_is_503(client, monkeypatch):
    monkeypatch.setattr("kvweave.explorer.routes._ENGINE_SECONDS", 0.0)
    reply = client.get("/explorer/api/tree")
    assert reply.status_code == 503
    assert "busy" in reply.json()["error"]["message"]
    monkeypatch.undo()
    assert client.get("/explorer/api/tree").status_code == 200, "the engine lives on"
