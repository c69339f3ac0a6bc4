"""Writes a reshape as the one step that it is, so that sizes which stay need not stand there."""

from __future__ import annotations

from partc.quoting import literal


def in_one_step(old: list[int], new: list[int]) -> str:
    """The call that makes one shape of another by one step; "" if it takes more.

    >>> in_one_step([4, 16, 64], [4, 16, 8, 8]), in_one_step([4, 16, 8, 8], [4, 128, 8])
    ('unflatten(2, (8, 8))', 'flatten(1, 2)')
    >>> in_one_step([4, 1], [4]), in_one_step([4, 6], [6, 4])
    ('squeeze(1)', '')
    """
    if len(old) == len(new):
        return ""
    short, long = sorted((old, new), key=len)
    at = next((i for i, (a, b) in enumerate(zip(short, long, strict=False)) if a != b), len(short))
    num = len(long) - len(short)  # as many dims more
    if num == 1 and long == [*short[:at], 1, *short[at:]]:
        return f"unsqueeze({at})" if long is new else f"squeeze({at})"
    parts = long[at : at + num + 1]
    if 1 in parts or at == len(short) or long != [*short[:at], *parts, *short[at + 1 :]]:
        return ""
    if long is new:
        return f"unflatten({at}, {literal(tuple(parts))})"
    last = at + num
    return f"flatten({at}, {last})" if last + 1 < len(old) else f"flatten({at or ''})"
