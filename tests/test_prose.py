"""The pages use the words of the field (a list of phrases that they avoid, with what to write), and are short."""

import ast
import re

import pytest

import afflux.lab
import afflux.sim
import afflux.store
from afflux import codecs, ops, rules
from conftest import DOCS, ROOT

#: A phrase as a pattern, without regard to case, and what to write instead.
PHRASES = {
    r"(has|have|had|with|of|gives?|gave|are|is) the (same )?bits of": "is bit-identical to",
    r"(to|with|gives?|gave|has|have|had) the same bits": "bit-identical, the same result bit for bit",
    r"to the (last )?bit": "bit for bit, bit-identical",
    r"mak(e|es|ing) a (server )?step": "takes a step, updates the model",
    r"makes? (its|the|one|no) step": "takes a step, updates the model",
    r"(versions?|steps?) (is|are|was|were) made": "the server takes a step, updates the model",
    r"goes on": "continues, resumes",
    r"an?y? text": "a string, any string",
    r"laws? of": "distribution of (delays), function of (staleness)",
    r"(staleness|delay) laws?": "staleness function, delay distribution",
    r"what (has )?(became|becomes|become) of": "the result of, the status of",
    r"stands? for": "represents, means",
    r"have? a row": "the server stores a vector for the client",
    r"(is|are|was|were|be) refused": "is rejected, raises an error",
    r"refus(es|e|ing)": "rejects, raises an error",
    r"in the place of": "instead of",
    r"no more than": "at most",
    r"(?<!there )is no (arrival|tree|store|int|bool|number|float|page|file|folder|evidence|reason)": "is not a",
    r"to be had": "available",
    r"at hand": "available",
    r"anew": "again, from scratch",
    r"that of (the|a|an)": "repeat the noun",
    r"beside": "next to, with, besides (in addition to)",
    r"rules? weighs?|weighs the": "the rule sets the weights",
    r"by turns": "alternately",
    r"(is|are) to be": "must be, will be",
    r"from then on": "after that",
}
CODE = re.compile(r"^```.*?^```$|^:::.*?$|`[^`]*`|\]\([^)]*\)", re.MULTILINE | re.DOTALL)
#: All of the site, and that of a comparison.
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "bench").glob("[PR]*.md"))]
PAGES.append(ROOT / "python/afflux/lab/results/report.html")


def found(text: str) -> list[str]:
    """The phrases of a text, outside of code and addresses, each with what to write instead."""
    words = " ".join(CODE.sub("`code`", text).split())
    patterns = {re.compile(rf"\b(?:{old})\b", re.IGNORECASE): better for old, better in PHRASES.items()}
    return [f"{hit[0]!r}: write {better!r}" for old, better in patterns.items() for hit in old.finditer(words)]


def test_the_list_is_short_and_finds_its_phrases():
    assert len(PHRASES) <= 40
    assert found("The run goes\non. `goes on` is code.\n```\ngoes on\n```\n") == [
        "'goes on': write 'continues, resumes'"
    ]
    assert found("A push with a wrong client is rejected, and the run continues.") == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_has_none_of_the_phrases(page):
    assert found(page.read_text(encoding="utf-8")) == []


def test_messages_and_docstrings_have_none_of_the_phrases():
    """Strings of several words, help texts of commands included, and the docstrings of public names."""
    texts, public = [], (afflux, rules, ops, codecs, afflux.store, afflux.sim, afflux.lab)
    for file in (ROOT / "python/afflux").rglob("*.py"):
        nodes = [*ast.walk(ast.parse(file.read_text(encoding="utf-8")))]
        docstrings = {node.value for node in nodes if isinstance(node, ast.Expr)}
        strings = [node for node in nodes if isinstance(node, ast.Constant) and node not in docstrings]
        texts += [(f"{file}:{node.lineno}", node.value) for node in strings if isinstance(node.value, str)]
    for name, value in [(name, getattr(module, name)) for module in public for name in module.__all__]:
        members = [one for one in vars(value) if not one.startswith("_")] if isinstance(value, type) else []
        own = {name: value} | {f"{name}.{one}": getattr(value, one) for one in members}
        texts += [(at, one.__doc__ or "") for at, one in own.items() if callable(one) or isinstance(one, property)]
    assert len(texts) > 5000
    assert [(at, hits) for at, text in texts if (hits := found(text))] == []


def test_pages_are_short():
    """A guide has at most 1,200 words, another page 2,500, all together 40,000; README has 130 lines."""
    readme = ROOT / "README.md"
    words = {page: len(page.read_text(encoding="utf-8").split()) for page in [readme, *DOCS]}
    limits = {"guides": 1200, "reference": 2500}
    assert {page.parent.name for page in words} >= set(limits)
    assert {page.name: n for page, n in words.items() if n > limits.get(page.parent.name, 2500)} == {}
    assert sum(words.values()) <= 40_000
    assert len(readme.read_text(encoding="utf-8").splitlines()) <= 130
