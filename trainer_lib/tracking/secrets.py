"""Masking secrets in settings and command lines."""

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

MASK = "***"

_SECRET = {"password", "passwd", "passphrase", "secret", "secrets", "token", "credential", "credentials", "apikey"}
_KEYS = {"api", "access", "private", "secret", "auth", "signing", "encryption"}  # before "key"
# Vocabulary tokens, which are not credentials.
_VOCABULARY = {
    "pad",
    "eos",
    "bos",
    "unk",
    "sep",
    "cls",
    "mask",
    "special",
    "image",
    "start",
    "end",
    "decoder",
    "padding",
}

_WORDS = r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+"
_USER_IN_ADDRESS = r"(?P<scheme>[a-zA-Z][\w+.-]*://)[^/\s@]+@"
_IN_QUERY = r"(?P<name>[?&;](?P<key>[\w.-]+)=)[^&;\s#]+"


def is_secret(name: str) -> bool:
    """Whether a setting of this name holds a credential.

    Example:
        >>> is_secret("hub_token"), is_secret("wandb.apiKey"), is_secret("pad_token"), is_secret("max_tokens")
        (True, True, False, False)
    """
    words = [word.lower() for word in re.findall(_WORDS, name.rpartition("/")[2])]
    for previous, word in zip(["", *words], words, strict=False):
        if word == "token" and (previous in _VOCABULARY or word != words[-1]):
            continue
        if word in _SECRET or (word == "key" and previous in _KEYS):
            return True
    return False


def masked(value: Any, name: str = "") -> Any:
    """Return a setting with its secrets masked, by its name and inside URLs.

    Example:
        >>> masked({"api_key": "k", "uri": "https://me:pw@host/x", "steps": 3})
        {'api_key': '***', 'uri': 'https://***@host/x', 'steps': 3}
    """
    if isinstance(value, Mapping):
        return {key: masked(item, str(key)) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [masked(item, name) for item in value]
    if isinstance(value, bytes):
        return MASK if is_secret(name) else value
    if not isinstance(value, str):
        return value
    if value and is_secret(name):
        return MASK
    return _in_text(value)


def masked_command(words: Sequence[str]) -> str:
    """Return a command line in shell syntax, with its secrets masked.

    Example:
        >>> masked_command(["train.py", "--api_key", "k", "--hub-token=t", "--name", "two words"])
        "train.py --api_key '***' '--hub-token=***' --name 'two words'"
    """
    shown: list[str] = []
    for previous, word in zip(["", *words], words, strict=False):
        name, equals, value = word.partition("=")
        if previous.startswith("-") and "=" not in previous and not word.startswith("-"):
            word = masked(word, _name_of(previous))
        elif name.startswith("-") and equals:
            word = f"{name}={masked(value, _name_of(name))}"
        else:
            word = masked(word)
        shown.append(word)
    return shlex.join(shown)


def _name_of(option: str) -> str:
    return option.lstrip("-").replace("-", "_")


def _in_text(text: str) -> str:
    if "://" not in text:
        return text
    hidden = re.sub(_USER_IN_ADDRESS, rf"\g<scheme>{MASK}@", text)
    return re.sub(_IN_QUERY, lambda match: match["name"] + MASK if is_secret(match["key"]) else match[0], hidden)
