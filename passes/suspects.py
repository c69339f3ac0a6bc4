"""Which passes and rules of a user's package took part in what came out wrong."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from partc.errors import CheckError
from partc.rules.table import used_rules

MOST_NAMED = 4


def suspects(passes: Iterable[str]) -> str:
    """What to look at first: passes of others that ran, as plans name them, and rules of others
    that were read in this process; "" for none of both.
    """
    ran, read = [*passes], [f"{name} ({module})" for name, module in used_rules().items()]
    told = []
    if ran:
        names = [each.partition(" ")[0] for each in ran]
        told.append(
            f"{_yours('pass', 'passes', ran)}: compile with disable={names} to see whether "
            f"{_it(ran)} at fault."
        )
    if read:
        it = "it" if len(read) == 1 else "them"
        told.append(
            f"{_yours('rule of', 'rules of', read)}: prove {it} (partc.rules.prove), or compile "
            f"without {it}."
        )
    return " ".join(told)


def _yours(one: str, several: str, names: list[str]) -> str:
    alone = len(names) == 1
    return f"The {one if alone else several} {_listed(names)} {'is' if alone else 'are'} yours"


def _it(names: list[str]) -> str:
    return "it is" if len(names) == 1 else "one of them is"


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return f"{', '.join(names[:MOST_NAMED])}{more}"


@contextmanager
def blaming(name: str, ran: Mapping[str, str]) -> Iterator[None]:
    """Run partc's pass of a name; what fails in it behind passes or rules of others names these.

    ``ran``: passes of others, with their modules. CheckError for what is no error in words.
    """
    try:
        yield
    except Exception as error:
        told = suspects(f"{each} ({module})" for each, module in ran.items())
        words = isinstance(error, CheckError)
        if not told or told in str(error) or not (words or type(error).__module__ == "builtins"):
            raise
        raise _blamed(error, name, told) from error


def _blamed(error: Exception, name: str, told: str) -> CheckError:
    if isinstance(error, CheckError):
        do = f"{error.do} {told}"
        return type(error)(where=error.where, what=error.what, why=error.why, do=do)
    said = f"{type(error).__name__}: {error}".removesuffix(": ")
    return CheckError(
        where=f"pass {name}", what="it cannot go on with the graph that it is given",
        why=said.partition("\n")[0], do=told,
    )  # fmt: skip
