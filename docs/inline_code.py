"""Line breaks of inline code: not after the dashes of an option, but after the underscores and dots of a long name."""

import re
from typing import Any

_CODE = re.compile(r"<pre.*?</pre>|<code>([^<]+)</code>", re.DOTALL)
_LONG = 20


def on_page_content(html: str, **options: Any) -> str:
    """Return a page on which browsers break inline code where people would."""
    return _CODE.sub(lambda match: f"<code>{_with_breaks(match[1])}</code>" if match[1] else match[0], html)


def _with_breaks(code: str) -> str:
    return " ".join(_word(word) for word in code.split(" "))


def _word(word: str) -> str:
    if len(word) > _LONG:
        word = re.sub(r"(?<=\w)([_.,=(]+)(?=[\w{\[(&])", r"\1<wbr>", word)
    return f'<span class="no-break">{word}</span>' if "-" in word else word
