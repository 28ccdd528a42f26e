"""The form of a refusal: one sentence, exit code 1 (2 from argparse), no traceback.

The sentence is '<name> (<symbol>) must be <constraint>, got <value>.' and then what to do.
"""

from __future__ import annotations

import re

SENTENCE = re.compile(r"\S.* must (be|have|come|name) .+,? got .+", re.DOTALL)


def sentence(text: str) -> str:
    """Check the form of an error's text; its first line is all of it."""
    assert "\n" not in text.strip(), text
    assert SENTENCE.fullmatch(text.strip()), text
    return text.strip()


def refused(done, *parts: str, code: int = 1) -> str:
    """The sentence with which a command ended."""
    assert "Traceback" not in done.err, done.err
    assert done.code == code, f"exit code {done.code}: {done.out}{done.err}"
    assert done.err.startswith("fedpact: "), done.err
    text = sentence(done.err.removeprefix("fedpact: "))
    for part in parts:
        assert part in text, text
    return text
