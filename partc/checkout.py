"""What a checkout lacks whose links git wrote as text files; the build reads this file too."""

import os

LINKS = ("passes", "codegen")  # partc/<name> is a link to the folder <name> beside partc/


def refusal(package: str) -> str:
    """Why the folder `package` of partc cannot be used, in four parts; empty if nothing is amiss.

    The links of a checkout are folders in a wheel and in an sdist, which pass as well.
    """
    lost = [os.path.join(package, name) for name in LINKS if not _is_package(package, name)]
    if not lost:
        return ""
    names = " and ".join(lost)
    return (
        f"{names}: the code behind these links is missing (git wrote them as text files, as it "
        f"does with core.symlinks=false). Run `git config core.symlinks true` and `git checkout -- "
        "partc/passes partc/codegen`; Windows allows links in its developer mode."
    )


def _is_package(package: str, name: str) -> bool:
    return os.path.isfile(os.path.join(package, name, "__init__.py"))
