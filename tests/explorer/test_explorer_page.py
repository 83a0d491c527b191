"""The explorer's page in a real browser: content, keyboard, focus, and injected markup."""

import re
import shutil
from pathlib import Path

import pytest

from kvweave.prefix.contract import Declined
from support.explorerkit import DOCUMENT, ask, explored
from support.serverkit import eventually

pytestmark = pytest.mark.browser

SHOTS = Path(__file__).parents[2] / "out" / "explorer"
"""Pictures for people to look at; git ignores them."""
EVIL = "<img src=x onerror=\"window.owned='img'\"><script>window.owned='script'</script>"
VIEWS = ("overview", "prompts/2", "tree", "playground")


@pytest.fixture(scope="module")
def browser():
    executable = shutil.which("chromium") or shutil.which("google-chrome")
    if executable is None:
        pytest.skip("there is no Chromium on this system")
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    # Of this module only: while it runs, no other event loop may run on this thread.
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def url():
    """A server with prompts: a donor, a moved one, a salted one, an exact one, two evil ones."""
    with explored() as client:
        ask(client, f"Read: {DOCUMENT}")
        ask(client, f"You are a porter. {DOCUMENT} When does it leave? {EVIL}")
        ask(client, f"Another tenant reads: {DOCUMENT}", cache_salt="tenant")
        ask(client, f"Exactly: {DOCUMENT}", fuzzy=False, rid="<b>rid</b>")
        client.cache.paraphrases.latest_declined.append(
            Declined("<b>rid</b>", 9, 20, "facts", f"{EVIL} is not 30")
        )
        ask(client, f"{EVIL} once", cache_salt="evil")
        ask(client, f"Then {EVIL} twice", cache_salt="evil", fuzzy=False)
        yield str(client.base_url)


@pytest.fixture
def open_page(browser):
    """Opens views of a server; at the end nothing was refused, foreign or broken."""
    contexts, faults, foreign = [], [], []

    def open_page(url, view="overview", scheme="light", width=1360):
        context = browser.new_context(
            color_scheme=scheme, viewport={"width": width, "height": 900}, reduced_motion="reduce"
        )
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(30_000)
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda said: said.type == "error" and faults.append(said.text))
        page.on(
            "request",
            lambda request: request.url.startswith(url) or foreign.append(request.url),
        )
        page.goto(f"{url}/explorer#/{view}")
        return page

    yield open_page
    for context in contexts:
        context.close()
    # A browser reports refusals as errors; the tests that bring them about look at them.
    assert [fault for fault in faults if "Failed to load resource" not in fault] == []
    assert foreign == [], "the page works without any other server"


def shot(page, name):
    SHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SHOTS / f"{name}.png")


def tip(page):
    page.locator("#tip:not([hidden])").wait_for()
    return page.locator("#tip").inner_text()


def test_the_map_colours_each_source_and_tells_donor_and_positions(open_page, url):
    page = open_page(url, "prompts/2")
    moved = page.locator(".run.moved")
    assert moved.inner_text().strip().startswith(DOCUMENT[:30])
    assert page.locator(".run.fresh").first.inner_text().startswith("You are")
    assert moved.evaluate("run => getComputedStyle(run).backgroundColor") != page.locator(
        ".run.fresh"
    ).first.evaluate("run => getComputedStyle(run).backgroundColor")
    moved.locator("[data-at]").nth(3).hover()
    at, donor_at = map(int, re.findall(r"\b(\d+)\b(?=:| of prompt #1)", tip(page)))
    assert at - donor_at == len("You are a porter. ") - len("Read: ")
    shot(page, "map")


def test_a_run_leads_to_its_donor_by_keyboard(open_page, url):
    page = open_page(url, "prompts/2")
    run = page.locator("a.run.moved")
    text = run.inner_text()
    page.locator(".map").focus()
    page.keyboard.press("Tab")
    assert run.evaluate("run => run === document.activeElement")
    assert "from prompt #1" in tip(page)
    page.keyboard.press("Escape")
    assert page.locator("#tip").is_hidden()
    page.keyboard.press("Enter")
    page.locator(".lent").first.wait_for()
    assert page.locator("h2.h1").inner_text() == "Prompt #1"
    assert "".join(page.locator(".lent").all_text_contents()) == text
    assert page.locator("h2.h1").evaluate("title => title === document.activeElement")
    shot(page, "donor")


def test_why_not_names_run_donor_and_gate(open_page, url):
    page = open_page(url, "prompts/4")
    page.get_by_role("button", name="Why not more?").click()
    reason = page.locator(".reasons li").first
    assert reason.locator(".gate").inner_text() == "exact-only"
    assert "Longest shared run" in reason.inner_text()
    assert DOCUMENT[:20] in reason.locator("blockquote").inner_text()
    words = page.locator(".reasons").last
    assert "11 tokens at 9." in words.inner_text()
    assert f"facts {EVIL} is not 30." in words.inner_text()
    reason.get_by_role("link", name="prompt #1").click()
    page.locator(".lent").first.wait_for()


def test_the_tree_is_walked_by_keyboard(open_page, url):
    page = open_page(url, "tree")
    page.locator("[role=treeitem]").first.wait_for()
    focused = "document.activeElement.getAttribute('aria-label')"
    page.locator("[role=treeitem][tabindex='0']").focus()
    page.keyboard.press("Home")
    assert page.evaluate(focused).startswith("Prompts with")
    page.keyboard.press("ArrowRight")
    assert "tokens from 0 on" in page.evaluate(focused)
    detail = page.locator(".node-detail")
    assert "Prompts on it" in detail.inner_text()
    page.keyboard.press("End")
    assert page.locator("[aria-selected=true]").count() == 1
    page.keyboard.press("ArrowLeft")
    assert page.evaluate(focused).startswith("Prompts with")
    page.locator("[role=treeitem].goes").first.click()
    assert "in the queue" in detail.inner_text()
    detail.get_by_role("link").first.click()
    page.locator(".map").wait_for()
    page.go_back()
    page.locator(".badge").first.wait_for()
    shot(page, "tree")


def test_the_list_shows_where_each_prompt_differs_and_can_be_filtered(open_page, url):
    page = open_page(url, "prompts/1")
    entries = page.locator(".prompts li")
    page.get_by_text("You are a porter.").first.wait_for()
    assert entries.count() == 6
    page.get_by_label("Show only").fill("porter")
    assert page.locator(".prompts li:visible b").all_inner_texts() == ["#2"]
    page.get_by_label("Show only").fill("#4")
    assert page.locator(".prompts li:visible b").all_inner_texts() == ["#4"]


def test_bands_lead_from_where_moved_text_was_to_where_it_is(open_page, url):
    page = open_page(url, "prompts/2")
    band = page.locator(".relations .band.fill-moved")
    band.first.wait_for()
    band.first.click()
    page.locator(".lent").first.wait_for()
    assert page.url.split("?")[0].endswith("#/prompts/1")


def test_what_leaves_next_is_listed_in_order(open_page, url):
    page = open_page(url, "tree")
    first = page.locator(".next li").first
    first.wait_for()
    first.get_by_role("button").click()
    assert "number 1 in the queue" in page.locator(".node-detail").inner_text()


def test_the_playground_is_no_traffic_and_says_what_an_exact_backend_can_show(open_page):
    with explored("radix") as client:
        ask(client, "Someone asks.")
        ask(client, "Just trying.", rid="playground-1-2-x")
        page = open_page(str(client.base_url))
        page.locator("circle.dot").first.wait_for()
        assert page.locator("circle.dot").count() == 1
        page.get_by_role("link", name="Playground").click()
        page.get_by_text("radix reuses common beginnings only").wait_for()
        page.get_by_role("link", name="Prompts").click()
        assert "playground" in page.locator(".prompts li").first.inner_text()


def test_a_backend_without_a_tree_says_so(open_page):
    with explored("hash") as client:
        page = open_page(str(client.base_url), "tree")
        page.get_by_text("keeps no tree").wait_for()


def test_the_overview_draws_each_prompt_and_leads_to_it(open_page, url):
    page = open_page(url)
    page.locator("circle.dot").nth(5).wait_for()
    assert page.locator("circle.dot").count() == 6
    shot(page, "overview")
    page.locator("circle.dot").nth(1).click()
    page.locator(".run.moved").wait_for()
    assert page.url.endswith("#/prompts/2")


def test_who_is_being_answered_is_listed(open_page, server, engine):
    engine.hold = "decode"
    with server.client() as client:
        body = {"prompt": "hello", "rid": "patient", "stream": True, "max_tokens": 3}
        with client.stream("POST", "/v1/completions", json=body):
            page = open_page(server.url)
            assert "answering" in page.get_by_role("row", name="patient").inner_text()
            engine.hold = None
        page.get_by_text("No request is in progress").wait_for()


def test_the_playground_marks_the_tokens_that_differ(open_page, server, engine):
    engine.answer = lambda request, index: (
        "one too three" if engine.requests[2:] else "one two three"
    )
    page = open_page(server.url, "playground")
    page.get_by_label("First prompt").fill("the first")
    page.get_by_label("Second prompt").fill("the second")
    page.get_by_role("button", name="Ask cold and warm").click()
    cards = page.locator(".answer-card .reading")
    cards.nth(1).wait_for()
    assert cards.all_inner_texts() == ["one two three", "one too three"]
    assert page.locator("mark").all_inner_texts() == ["w", "o"]
    assert page.get_by_text("differ in 1 of 13").is_visible()
    cold, first, warm = engine.requests
    assert cold.prompt_ids == warm.prompt_ids != first.prompt_ids
    assert cold.cache_salt != first.cache_salt == warm.cache_salt
    shot(page, "playground")


def test_a_sample_that_comes_late_leaves_who_is_typing_alone(open_page, server):
    late = []
    page = open_page(server.url)
    page.route("**/sample.txt", lambda route: late.append(route))
    with page.expect_request("**/sample.txt"):
        page.get_by_role("link", name="Playground").click()
    second = page.get_by_label("Second prompt")
    second.focus()
    [sample] = late
    sample.continue_()
    assert eventually(lambda: page.get_by_label("First prompt").input_value())
    page.keyboard.type("mine")
    assert second.input_value() == "mine"


def test_what_goes_wrong_in_the_playground_is_said(open_page, server):
    page = open_page(server.url, "playground")
    page.get_by_label("Second prompt").fill("x" * 5000)
    page.get_by_role("button", name="Ask cold and warm").click()
    assert "2048" in page.get_by_role("alert").filter(has_text="token").inner_text().replace(
        ",", ""
    )


def test_the_key_is_asked_for_kept_in_the_tab_and_forgotten(open_page):
    with explored(api_key="s3crét") as client:
        ask(client, DOCUMENT)
        page = open_page(str(client.base_url), "prompts/1")
        field = page.get_by_label("API key", exact=True)
        field.fill("wrong")
        shot(page, "key")
        page.keyboard.press("Enter")
        page.get_by_text("does not take this key").wait_for()
        page.get_by_label("API key", exact=True).fill("s3crét")
        page.keyboard.press("Enter")
        page.locator(".map").wait_for()
        assert page.evaluate("Object.values(sessionStorage)") == ["s3crét"]
        assert "s3cr" not in page.evaluate("JSON.stringify({...localStorage}) + document.cookie")
        page.get_by_role("button", name="Forget key").click()
        field.wait_for()
        assert page.evaluate("Object.values(sessionStorage)") == []


def test_a_key_that_is_not_the_operators_can_be_replaced(open_page):
    with explored(api_key="client", admin_api_key="operator") as client:
        page = open_page(str(client.base_url), "overview")
        for key, comes in (("client", "#key-problem:has-text('operators')"), ("operator", "h1")):
            page.get_by_label("API key", exact=True).fill(key)
            page.keyboard.press("Enter")
            page.locator(comes).wait_for()


def test_hidden_text_leaves_runs_and_positions(open_page):
    with explored(explorer_hide_text=True) as client:
        ask(client, f"Read: {DOCUMENT}")
        ask(client, f"You are a porter. {DOCUMENT} When does it leave?")
        page = open_page(str(client.base_url), "prompts/2")
        page.get_by_text("Texts are withheld").wait_for()
        page.get_by_role("cell", name="prompt #1").wait_for()
        assert "ferry" not in page.content()
        shot(page, "hidden")
        page.goto(f"{client.base_url}/explorer#/tree")
        page.locator("[role=treeitem]").first.wait_for()
        assert "ferry" not in page.content()


def test_text_of_prompts_is_never_markup(open_page, url):
    page = open_page(url, "prompts/2")
    page.locator(".map").wait_for()
    assert EVIL in page.locator(".map").inner_text()
    for view in ("prompts/4", "prompts/6", "tree", "overview"):
        page.goto(f"{url}/explorer#/{view}")
        page.locator("main h1, main h2").first.wait_for()
        if view == "prompts/6":
            page.get_by_role("button", name="Why not more?").click()
            assert page.locator("blockquote").inner_text().startswith("<img")
        page.wait_for_timeout(150)
        assert page.locator("main img, main script, main b:text-is('rid')").count() == 0
    assert page.evaluate("window.owned") is None


def test_dark_and_light_follow_the_system_and_the_toggle(open_page, url):
    def background(page):
        return page.evaluate("getComputedStyle(document.body).backgroundColor")

    light, dark = open_page(url, "prompts/2"), open_page(url, "prompts/2", scheme="dark")
    assert background(light) != background(dark)
    dark.locator(".map").wait_for()
    shot(dark, "map-dark")
    dark.get_by_role("button", name="Theme: auto").click()
    assert background(dark) == background(light)
    dark.reload()
    assert background(dark) == background(light), "the choice is remembered"
    dark.get_by_role("button", name="Theme: light").click()
    assert background(dark) != background(light)


@pytest.mark.parametrize(("scheme", "views"), [("light", VIEWS), ("dark", VIEWS[1:3])])
def test_nothing_serious_stands_in_anyones_way(open_page, url, scheme, views):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is not there")
    page = open_page(url, scheme=scheme)
    for view in views:
        page.goto(f"{url}/explorer#/{view}")
        page.locator("main h1, main h2").first.wait_for()
        if view.startswith("prompts"):
            page.get_by_role("button", name="Why not more?").click()
            page.locator("summary").click()
        page.wait_for_timeout(200)
        found = axe.Axe().run(page).response["violations"]
        serious = [
            (rule["id"], [node["target"] for node in rule["nodes"]][:3])
            for rule in found
            if rule["impact"] in ("serious", "critical")
        ]
        assert serious == [], view


@pytest.mark.parametrize("view", VIEWS)
def test_a_narrow_window_needs_no_sideways_scrolling(open_page, url, view):
    page = open_page(url, view, width=390)
    page.locator("main h1, main h2").first.wait_for()
    page.wait_for_timeout(100)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    shot(page, f"narrow-{view.split('/')[0]}")


def test_where_the_server_began_anew_nothing_old_stays(open_page):
    with explored() as client:
        for text in ("first", "second", "third"):
            ask(client, text)
        page = open_page(str(client.base_url), "prompts/3")
        page.get_by_role("heading", name="Prompt #3").wait_for()
        history = client.service.observer
        history._records.clear()
        history._added, history.started = 0, history.started + 1
        ask(client, "of another life")
        page.locator(".prompts li").nth(2).wait_for(state="detached")
        assert page.locator(".prompts li b").all_inner_texts() == ["#1"]


def test_a_server_that_answers_later_is_shown_then(open_page, server):
    page = open_page(server.url, "no/where")
    page.locator("main h1").wait_for()
    page.route(re.compile("/api/overview"), lambda route: route.fulfill(status=503, json={}))
    page.reload()
    page.get_by_text("the server answered 503").wait_for()
    page.unroute_all()
    page.locator("main h1").wait_for()
    page.goto(f"{server.url}/explorer#/constructor")
    page.get_by_role("heading", name="Overview").wait_for()


def test_news_comes_by_itself(open_page, server, engine):
    page = open_page(server.url, "prompts")
    with server.client() as client:
        ask(client, "a new prompt", rid="new")
    page.locator(".prompts li").first.wait_for()
