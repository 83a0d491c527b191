"""Real texts to measure with: other people's, under their own licences, fetched and never shipped.

Each source is fetched once and kept in the cache folder. Where it is looked for, in this order: the
cache; the running system, if the Debian package is installed; Debian's archive by apt, or PyPI by
pip. There is no substitute when all of them fail, since made-up text would flatter the figures: the
bench then ends with a sentence that names the package.

`python -m kvweave_bench.texts` fetches all of them.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from kvweave.errors import KvweaveError
from kvweave.models.cache import cache_folder
from kvweave_bench.fetch import FetchError, debian_text, wheel_files


@dataclass(frozen=True, slots=True)
class Text:
    """One document. `facts` are what its source states as data (countries: capital, area ...)."""

    title: str
    body: str
    facts: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Collection:
    """What one source held: `origin` is its package and version, for reports."""

    source: str
    origin: str
    licence: str
    texts: tuple[Text, ...]


@dataclass(frozen=True, slots=True)
class _Source:
    licence: str
    fetch: Callable[[], tuple[str, list[Text]]]


def source_names() -> tuple[str, ...]:
    """All sources that `load` knows."""
    return tuple(_SOURCES)


def load(name: str) -> Collection:
    """A source's texts, fetched now if they never were. Raises FetchError if they cannot be had."""
    if name not in _SOURCES:
        raise KvweaveError(f"texts come from {', '.join(_SOURCES)}, not {name!r}")
    kept = cache_folder() / "texts" / f"{name}.json"
    if kept.is_file():
        raw = json.loads(kept.read_text(encoding="utf-8"))
        return Collection(**{**raw, "texts": tuple(Text(**text) for text in raw["texts"])})
    source = _SOURCES[name]
    origin, texts = source.fetch()
    found = Collection(name, origin, source.licence, tuple(texts))
    kept.parent.mkdir(parents=True, exist_ok=True)
    # Two processes may fetch at once: the second replaces equal content.
    partial = kept.with_suffix(f".{os.getpid()}.partial")
    partial.write_text(json.dumps(asdict(found), ensure_ascii=False), encoding="utf-8")
    os.replace(partial, kept)
    return found


def prose(text: str) -> str:
    """The paragraphs of a plain-text manual that are sentences, each unwrapped to one line.

    Tables, screens, headings and tables of contents repeat themselves and are not what people put
    into prompts. A paragraph stays if it has 12 words or more, ends like a sentence, is at least
    80 % letters and spaces and at most 3 % digits, and did not occur before.
    """
    kept: dict[str, None] = {}
    for paragraph in re.split(r"\n\s*\n", text):
        line = " ".join(paragraph.split())
        letters = sum(char.isalpha() or char == " " for char in line)
        digits = sum(char.isdigit() for char in line)
        if (
            len(line.split()) >= 12
            and line[-1] in ".:;!?)]"
            and letters >= 0.8 * len(line)
            and digits <= 0.03 * len(line)
        ):
            kept[line] = None
    return "\n\n".join(kept)


def _debian(package: str, title: str, member: str) -> Callable[[], tuple[str, list[Text]]]:
    def fetch() -> tuple[str, list[Text]]:
        text, version = debian_text(package, member)
        return f"{package} {version}", [Text(title, prose(text))]

    return fetch


def _banking() -> tuple[str, list[Text]]:
    path = "inspect_evals/tau2/data/domains/banking_knowledge/documents.json.gz"
    files = wheel_files("inspect_evals", "0.28.0", _INSPECT_EVALS_SHA256, path)
    documents = json.loads(gzip.decompress(files[path]))
    return "inspect_evals 0.28.0", [Text(each["title"], each["content"]) for each in documents]


def _countries() -> tuple[str, list[Text]]:
    """One passage per country: the package holds data, the sentences around it are ours."""
    files = wheel_files("countryinfo", "1.0.1", _COUNTRYINFO_SHA256, "countryinfo/data/")
    countries = [json.loads(files[path]) for path in sorted(files) if path.endswith(".json")]
    texts = [_country(each) for each in countries if each.get("capital") and each.get("population")]
    return "countryinfo 1.0.1", texts


def _country(data: dict[str, Any]) -> Text:
    name = data["name"]
    facts = {}
    for key in _SENTENCES:
        value = data.get(key)
        if value:
            facts[key] = ", ".join(value) if isinstance(value, list) else str(value)
    sentences = [_SENTENCES[key].format(name=name, value=value) for key, value in facts.items()]
    return Text(name, " ".join(sentences), facts)


def _examples() -> tuple[str, list[Text]]:
    """Solved word problems: the question as body, the way to its answer as the fact `solution`."""
    path = "lm_eval/tasks/gsm8k/gsm8k-cot.yaml"
    written = wheel_files("lm_eval", "0.4.13", _LM_EVAL_SHA256, path)[path].decode("utf-8")
    # The pinned file's scalars are plain, wrapped lines: no need of a YAML library.
    found = re.findall(r"- question: (.+?)\n +target: (.+?)(?=\n *- |\n\w)", written, re.DOTALL)
    pairs = [(" ".join(question.split()), " ".join(target.split())) for question, target in found]
    texts = [Text("GSM8K example", question, {"solution": target}) for question, target in pairs]
    return "lm_eval 0.4.13", texts


def _question_pairs() -> tuple[str, list[Text]]:
    """Pairs of questions: one as body, the other as the fact `other`, and the pair's `category`."""
    path = "fow_cache/data/pairs.jsonl"
    files = wheel_files("fow_cache", "0.1.0", _FOW_CACHE_SHA256, path)
    pairs = [json.loads(line) for line in files[path].decode("utf-8").splitlines() if line]
    texts = [
        Text(pair["id"], pair["a"], {"other": pair["b"], "category": pair["category"]})
        for pair in pairs
    ]
    return "fow-cache 0.1.0", texts


_SENTENCES = {
    "subregion": "{name} is a country in {value}.",
    "capital": "The capital of {name} is {value}.",
    "population": "{name} has {value} inhabitants.",
    "area": "The area of {name} is {value} square kilometres.",
    "currencies": "In {name} one pays in {value}.",
    "languages": "The codes of the languages of {name} are {value}.",
    "demonym": "People from {name} are called {value}.",
    "borders": "The codes of the neighbours of {name} are {value}.",
    "provinces": "The provinces of {name} are {value}.",
}
_INSPECT_EVALS_SHA256 = "1d5735999b1c4e481162cacc29b962beeefd540c1e6222cccfdb40e79e8d459d"
_COUNTRYINFO_SHA256 = "b02f6f534f0a3b9cdc73fba7e08f247e39826acfa54bf080f8e4eba812066350"
_LM_EVAL_SHA256 = "5daaa1973bf874005f64f28d3834b875f6886f0d6475878e6a6c821994a5286a"
_FOW_CACHE_SHA256 = "9857fda26ab05141bc982c85a34f5e7ae52b81514979a8a8fc64d8d6f1646de1"

_SOURCES = {
    "debian-faq": _Source(
        "Debian FAQ's permission notice (copies and modified versions under the same notice)",
        _debian("debian-faq", "Debian FAQ", "usr/share/doc/debian/FAQ/debian-faq.en.txt.gz"),
    ),
    "debian-policy": _Source(
        "GPL-2.0-or-later",
        _debian(
            "debian-policy", "Debian Policy Manual", "usr/share/doc/debian-policy/policy.txt.gz"
        ),
    ),
    "debian-reference-en": _Source(
        "GPL-2.0-or-later",
        _debian(
            "debian-reference-en",
            "Debian Reference",
            "usr/share/debian-reference/debian-reference.en.txt.gz",
        ),
    ),
    "banking": _Source("MIT", _banking),
    "countries": _Source("MIT", _countries),
    "gsm8k-cot": _Source("MIT", _examples),
    "fow-cache": _Source("CC-BY-4.0", _question_pairs),
}


def main() -> int:
    """Fetch every source; one line each, and exit code 2 if any could not be had."""
    failed = 0
    for name in source_names():
        try:
            found = load(name)
        except FetchError as error:
            print(error, file=sys.stderr)
            failed += 1
            continue
        words = sum(len(text.body.split()) for text in found.texts)
        print(f"{name}: {len(found.texts)} texts, {words:,} words, {found.origin}, {found.licence}")
    return 2 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
