"""docs/architecture.md lists the files of the package that execute in a step of Kangaroo."""

import re
import sys

import pytest
from commands import ROOT
from helpers import adapter_for, chain_of, random_prompts, tiny

from kangaroo.engine.engine import Engine
from kangaroo.engine.requests import Request
from kangaroo.engine.sampling import Sampling

PACKAGE = ROOT / "kangaroo"


def executed(engine, sampling):
    """The files with a function that runs in a text's steps after the first, by their paths."""
    session, files = engine.open(1, 64, sampling), set()
    session.admit(0, Request(random_prompts(20)[0], 40, ignore_eos=True))
    session.step()

    def profile(frame, event, argument):
        files.add(frame.f_code.co_filename)

    sys.setprofile(profile)
    try:
        for _ in range(8):
            session.step()
    finally:
        sys.setprofile(None)
    return {file.removeprefix(f"{PACKAGE}/") for file in files if file.startswith(f"{PACKAGE}/")}


@pytest.mark.parametrize("compiled, lines", [(True, 1700), (False, 3000)])
def test_a_step_executes_the_files_that_the_page_lists(compiled, lines):
    lm = tiny()
    if compiled:
        assert lm.compile_for_decoding().backend.is_compiled, "there is no C++ compiler"
    engine = Engine(lm, chain_of(lm, adapter_for(lm), 4, 0.3))
    files = executed(engine, Sampling()) | executed(engine, Sampling(temperature=0.8, seed=1))
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    kind = "Native" if compiled else "Reference"
    count, listed = re.search(rf"^- {kind}, (\d+) files: (.*?)\.$", page, re.S | re.M).groups()
    assert files == {*re.findall(r"`([\w/]+\.py)`", listed)} and len(files) == int(count)
    assert sum(len((PACKAGE / file).read_text().splitlines()) for file in files) <= lines
