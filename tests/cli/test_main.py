"""The command line as a whole: one sentence and exit code 2 for every error."""

import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec

import pytest

import kvweave
from kvweave.cli.main import main
from kvweave.config.model import _lacks_cuda
from kvweave.errors import UnsupportedModelError, extra
from kvweave_bench.options import BENCHES


def test_an_extra_is_named_as_it_can_be_installed(monkeypatch, tmp_path):
    assert extra("ray") == "pip install '.[ray]'"
    monkeypatch.setattr("kvweave.errors.__file__", str(tmp_path / "lib/kvweave/errors.py"))
    assert extra("ray") == "pip install 'kvweave[ray]'"


def run(*arguments):
    with pytest.raises(SystemExit) as left:
        main(arguments)
    return left.value.code


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serve", "--port", "x", "--page-size", "-1"], "--port"),
        (["serve", "--port"], "--port"),
        (["serve", "--model", "/no/such/folder", "--port", "0"], "/no/such/folder"),
        (["serve", "--host", "no such host"], "no such host"),
        (["frobnicate"], "frobnicate"),
        (["generate", "--max-tokens", "-1", "x"], "--max-tokens must be"),
        (["generate", "--temperature", "hot", "x"], "--temperature takes a number"),
        (["chat", "--top-p", "0"], "--top-p must be above 0"),
        (["bench"], "cold-groups"),
        (["bench", "nonesuch"], "nonesuch"),
        (["bench", "engine", "--json"], "--json"),
        (["info", "--model", "/no/such/folder"], "/no/such/folder"),
        (["info", "--dtype", "int3"], "--dtype is one of"),
    ],
)
def test_errors_are_one_sentence_and_code_2(arguments, words, capfd):
    assert run(*arguments) == 2
    out, err = capfd.readouterr()
    assert out == ""
    [line] = err.strip().split("\n")
    assert line.startswith("kvweave: ")
    assert words in line


def test_unexpected_errors_are_one_sentence_too_except_under_debug(monkeypatch, capfd):
    def broken(*_):
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr("kvweave.server.app.bind", broken)
    assert run("serve") == 2
    assert "unexpected ZeroDivisionError: by zero (--debug shows where)" in capfd.readouterr().err
    with pytest.raises(ZeroDivisionError):
        main(["serve", "--debug"])
    monkeypatch.setenv("KVWEAVE_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        main(["serve"])


def test_an_unsupported_model_is_reported_in_one_sentence(monkeypatch, capfd):
    def refuse(*_):
        raise UnsupportedModelError("gpt9 cannot be served: it has no layers.")

    monkeypatch.setattr("kvweave.models.load_model", refuse)
    monkeypatch.setattr("kvweave.cli.model.check_machine", lambda config: None)
    assert run("info", "--model", "gpt9") == 2
    assert capfd.readouterr().err == "kvweave: gpt9 cannot be served: it has no layers\n"


def test_serve_warns_of_fuzzy_flags_without_effect(monkeypatch, caplog):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("kvweave.server.logs.configure_logging", lambda *_: None)
    monkeypatch.setattr("kvweave.server.app.bind", stop)
    assert run("serve", "--fuzzy-provider", "spans") == 130
    assert "without effect: --fuzzy-provider" in caplog.text


def test_interrupting_is_quiet(monkeypatch, capfd):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("kvweave.server.app.bind", interrupted)
    assert run("serve") == 130
    assert "Traceback" not in capfd.readouterr().err


def test_help_lists_flags_under_a_heading_per_area(capsys):
    assert run("serve", "--help") == 0
    out = capsys.readouterr().out
    order = [
        out.index(each) for each in ("Model options:", "--dtype", "Cache options:", "--page-size")
    ]
    assert order == sorted(order)
    assert out.index("Cluster options:") < out.index("\nOptions:") < out.index("--config")


def test_version_and_help(capsys):
    assert run("--version") == 0
    assert capsys.readouterr().out == f"kvweave {kvweave.__version__}\n"
    assert run() == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("serve", "generate", "chat", "bench", "info"))


def test_benches_are_listed_one_a_line(capsys):
    assert run("bench", "--list") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(BENCHES)
    told = zip(lines, BENCHES.values(), strict=True)
    assert all(line.endswith(f"  {what}") for line, what in told)


def test_options_of_the_command_line_reach_the_bench(monkeypatch, tmp_path):
    told = []
    monkeypatch.setattr(
        "kvweave_bench.registry.run_bench",
        lambda name, options, json_path: told.append((name, options, json_path)),
    )
    file = tmp_path / "figures.json"
    assert run("bench", "lookup", "--quick", "--seed", "7", "--json", str(file)) == 0
    [(name, options, json_path)] = told
    assert (name, options.quick, options.seed, json_path) == ("lookup", True, 7, file)


def test_info_without_a_model_loads_no_torch():
    code = (
        "import sys; from kvweave.cli.main import main\n"
        "try: main(['info'])\n"
        "except SystemExit as left: sys.exit(left.code or 9 * ('torch' in sys.modules))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    assert version("torch") in shown.stdout
    assert "packaged" in shown.stdout


def test_info_shows_facts_about_a_model(tiny_folder, capsys):
    assert run("info", "--model", str(tiny_folder("llama"))) == 0
    facts = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines())
    assert facts["kvweave"] == kvweave.__version__
    assert facts["context"] == "256 tokens"
    assert "fuzzy_match" in facts["prefix"]
    assert facts["attention"].startswith("cpu")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["serve", "--help"], 0, ""),
        (["bench", "--list"], 0, ""),
        (["serve", "--model", "/no/such/folder"], 2, "no folder or GGUF file /no/such/folder"),
        (["info", "--model", "./none.gguf"], 2, "no folder or GGUF file ./none.gguf"),
        (["serve", "--model", "no-one/nothing"], 2, "HF_HUB_OFFLINE forbids to ask the model hub"),
        (["generate", "--device", "gpu", "x"], 2, "--device is one of auto, cpu, cuda"),
        (["serve", "--device", "cuda"], 2, "--device cuda cannot be used"),
        (["chat", "--max-total-tokens", "8"], 2, "holds no page of --page-size 16"),
        (
            [*("serve", "--prefix-cache-backend", "fuzzy_match", "--fuzzy-provider", "semblend")],
            2,
            "--fuzzy-provider semblend is not installed",
        ),
    ],
)
def test_help_and_early_errors_load_no_torch(arguments, code, words):
    if "cuda" in arguments and not _lacks_cuda():
        pytest.skip("this machine has a GPU driver")
    if "semblend" in arguments and find_spec("semblend") is not None:
        pytest.skip("semblend is installed")
    program = (
        "import sys; from kvweave.cli.main import main\n"
        f"try: main({arguments!r})\n"
        "except SystemExit as left: code = left.code\n"
        "assert 'torch' not in sys.modules, 'it would take seconds'\n"
        "sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, words in done.stderr) == (code, True), done.stderr
