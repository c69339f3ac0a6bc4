from pathlib import Path

import pytest

TEST = """
import pytest
def test_plan(golden):
    golden("a\\nb\\n")
@pytest.mark.parametrize("size", ["x/2"])
def test_source(golden, size):
    golden("x = 1", ".py")
"""


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    """A project with this conftest and two golden tests, whose golden files are written."""
    pytester.makeini("[pytest]\ntestpaths = tests")
    conftest = Path(__file__).with_name("conftest.py").read_text(encoding="utf-8")
    _write(pytester, "tests/conftest.py", conftest)
    _write(pytester, "tests/test_toy.py", TEST)
    assert pytester.inline_run("--update-golden").ret == 0
    return pytester


def _write(pytester: pytest.Pytester, name: str, text: str) -> Path:
    path = pytester.path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def _files(pytester: pytest.Pytester) -> list[str]:
    folder = pytester.path / "tests/golden"
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


@pytest.mark.exhaustive
def test_update_writes_files_named_after_tests(project: pytest.Pytester) -> None:
    assert _files(project) == ["test_toy/test_plan.txt", "test_toy/test_source-x-2.py"]
    assert (project.path / "tests/golden/test_toy/test_plan.txt").read_text() == "a\nb\n"
    assert project.inline_run().ret == 0


def test_missing_file_fails_with_hint(project: pytest.Pytester) -> None:
    (project.path / "tests/golden/test_toy/test_plan.txt").unlink()
    result = project.runpytest()
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        ["tests/golden/test_toy/test_plan.txt", "there is no such file", "*pytest --update-golden"]
    )


def test_different_text_fails_with_diff(project: pytest.Pytester) -> None:
    _write(project, "tests/golden/test_toy/test_plan.txt", "a\nc\n")
    result = project.runpytest()
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["-c", "+b", "accept with: pytest --update-golden"])


def test_long_diff_is_cut(project: pytest.Pytester) -> None:
    _write(project, "tests/golden/test_toy/test_plan.txt", "x\n" * 100)
    project.runpytest().stdout.fnmatch_lines(["... * more lines"])


def test_source_that_does_not_parse_fails(project: pytest.Pytester) -> None:
    _write(project, "tests/test_bad.py", 'def test_bad(golden):\n    golden("x =", ".py")\n')
    project.runpytest("--update-golden").assert_outcomes(passed=2, failed=1)
    assert "test_bad/test_bad.py" not in _files(project)


def test_second_text_under_one_name_fails(project: pytest.Pytester) -> None:
    _write(project, "tests/test_two.py", 'def test_two(golden):\n    golden("a"); golden("a")\n')
    project.runpytest("--update-golden").assert_outcomes(passed=2, failed=1)


@pytest.mark.exhaustive
@pytest.mark.parametrize("processes", [["-n", "2"], []])
def test_full_run_fails_on_stale_file(project: pytest.Pytester, processes: list[str]) -> None:
    _write(project, "tests/golden/test_toy/test_gone.txt", "a\n")
    result = project.runpytest_subprocess(*processes)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["*no test asks for*", "tests/golden/test_toy/test_gone.txt"])


@pytest.mark.rows(1)
@pytest.mark.parametrize("selection", [["-k", "plan"], ["tests/test_toy.py"], ["--collect-only"]])
def test_partial_run_ignores_stale_file(project: pytest.Pytester, selection: list[str]) -> None:
    _write(project, "tests/golden/test_toy/test_gone.txt", "a\n")
    assert project.runpytest(*selection).ret == 0


def test_skipped_test_keeps_its_file(project: pytest.Pytester) -> None:
    _write(project, "tests/test_toy.py", TEST + '    pytest.skip("no transformers")\n')
    _write(project, "tests/golden/test_toy/test_source-x-2.txt", "a\n")
    assert project.runpytest().ret == 0


def test_full_update_removes_stale_file(project: pytest.Pytester) -> None:
    _write(project, "tests/golden/test_toy/test_gone.txt", "a\n")
    assert project.runpytest("--update-golden").ret == 0
    assert len(_files(project)) == 2


ROWS = """
import pytest
@pytest.mark.rows(3)
@pytest.mark.parametrize("row", range(9))
def test_table(row): pass
@pytest.mark.exhaustive
def test_long(): pass
def test_short(): pass
"""


@pytest.mark.parametrize(
    ("asked", "number"),
    [
        ((), 4),
        (("--exhaustive",), 11),
        (("tests/test_costly.py",), 4),
        (("tests/test_costly.py::test_table",), 9),
        (("tests/test_costly.py::test_long",), 1),
    ],
)
def test_rows_of_costly_tests(
    pytester: pytest.Pytester, asked: tuple[str, ...], number: int
) -> None:
    markers = "markers = rows: a number\n    exhaustive: costly"
    pytester.makeini(f"[pytest]\ntestpaths = tests\n{markers}")
    conftest = Path(__file__).with_name("conftest.py").read_text(encoding="utf-8")
    _write(pytester, "tests/conftest.py", conftest)
    _write(pytester, "tests/test_costly.py", ROWS)
    pytester.runpytest(*asked).assert_outcomes(passed=number)
