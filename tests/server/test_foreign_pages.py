"""A page of another site may link to the explorer, and make its visitors' browsers do no more."""

import pytest

FOREIGN = ("cross-site", "same-site")
OWN = ("same-origin", "none")


@pytest.mark.parametrize("site", FOREIGN)
def test_a_foreign_page_flushes_aborts_and_asks_nothing(client, engine, site):
    asked = {
        "content": b'{"prompt": "x", "abort_all": true}',
        "headers": {"sec-fetch-site": site, "content-type": "text/plain"},
    }
    for path in ("/v1/completions", "/abort_request", "/flush_cache"):
        reply = client.post(path, **asked)
        assert (reply.status_code, reply.json()["error"]["code"]) == (403, "foreign_page")
    assert client.get("/flush_cache", headers=asked["headers"]).status_code == 403
    assert not engine.requests
    assert not engine.aborts


@pytest.mark.parametrize("site", FOREIGN)
def test_it_may_link_to_the_page(client, site):
    assert client.get("/explorer", headers={"sec-fetch-site": site}).status_code == 200
    assert client.get("/health", headers={"sec-fetch-site": site}).status_code == 200


@pytest.mark.parametrize("site", OWN)
def test_the_servers_own_page_and_its_users_may(client, site):
    reply = client.post("/flush_cache", headers={"sec-fetch-site": site})
    assert reply.status_code == 200
