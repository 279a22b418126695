"""Line breaks of code: where they help to read a name, and none in aligned columns.

Inline code does not break after the dashes of an option, but after the underscores and dots of a long name. Text in
columns is marked, so that the style sheet lets it scroll; messages wrap.
"""

import re
from typing import Any

_CODE = re.compile(r"<pre.*?</pre>|<code>([^<]+)</code>", re.DOTALL)
_TEXT = re.compile(r'<div class="language-text( highlight"><pre>.*?</pre>)', re.DOTALL)
_COLUMNS = re.compile(r"\S {3,}\S")
_LONG = 14


def on_page_content(html: str, **options: Any) -> str:
    """Return a page on which browsers break code where people would."""
    html = _TEXT.sub(_marked, html)
    return _CODE.sub(lambda match: f"<code>{_with_breaks(match[1])}</code>" if match[1] else match[0], html)


def _marked(match: re.Match[str]) -> str:
    return f'<div class="language-text aligned{match[1]}' if _COLUMNS.search(match[1]) else match[0]


def _with_breaks(code: str) -> str:
    return " ".join(_word(word) for word in code.split(" "))


def _word(word: str) -> str:
    if len(word) > _LONG:
        word = re.sub(r"(?<=\w)([_.,=(]+)(?=[\w{\[(&])", r"\1<wbr>", word)
    return f'<span class="no-break">{word}</span>' if "-" in word else word
