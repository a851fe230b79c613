"""The locks of .ci/run are of this pyproject.toml, and the workflows of GitHub name its jobs."""

import re
import tomllib

import pytest
import yaml
from packaging.requirements import Requirement
from support import children
from support.repository import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]
LOCKS = sorted(path.name for path in ROOT.glob(".ci/*.lock"))


def requirements(extras):
    """Return the direct requirements of the package with extras, which may name each other."""
    found = [Requirement(text) for text in PROJECT["project"]["dependencies"]]
    for extra in extras:
        for requirement in map(Requirement, EXTRAS[extra]):
            if requirement.name == "pallas-flash":
                found += requirements(requirement.extras)
            else:
                found.append(requirement)
    return found


def unmet(text):
    """Return which requirements the versions of a lock do not meet; its first line names them."""
    header, *lines = text.splitlines()
    python, extras, others = re.fullmatch(
        r"# \.ci/lock wrote this: Python ([\d.]+), pallas-flash\[([\w,]+)\](?:, (.*))?", header
    ).groups()
    versions = dict(re.fullmatch(r"([\w.-]+)==([\w.]+)", line).groups() for line in lines)
    wanted = requirements(extras.split(","))
    wanted += map(Requirement, others.split(", ") if others else [])
    environment = {"python_version": python}
    return [
        str(x)
        for x in wanted
        if (x.marker is None or x.marker.evaluate(environment))
        and not (x.name in versions and x.specifier.contains(versions[x.name]))
    ]


@pytest.mark.parametrize("name", LOCKS)
def test_lock_meets_the_requirements(name):
    """After a change of them, .ci/lock writes it anew."""
    text = (ROOT / ".ci" / name).read_text()
    assert unmet(text) == []
    # And another version would not.
    assert unmet(re.sub("^jax==.*", "jax==0.13.0", text, flags=re.M))[0].startswith("jax<0.13")
    assert len(unmet(re.sub("^pytest==.*\n", "", text, flags=re.M))) == 1


def test_each_environment_of_the_gate_has_a_lock():
    assert LOCKS == ["between.lock", "newest.lock", "oldest.lock"]
    assert sorted(set(re.findall(r"\w+\.lock", (ROOT / ".ci/run").read_text()))) == LOCKS


def test_each_requirement_has_a_lower_bound():
    every = [*PROJECT["build-system"]["requires"], *PROJECT["project"]["dependencies"]]
    for texts in EXTRAS.values():
        every += texts
    without = [
        str(x)
        for x in map(Requirement, every)
        if x.name != "pallas-flash" and not {y.operator for y in x.specifier} & {">=", "=="}
    ]
    assert not without


@pytest.fixture(scope="module")
def jobs():
    """The jobs of .ci/run, from its sentence about one that it does not have."""
    command = [ROOT / ".ci/run", "no-such-job"]
    ran = children.run(command, stdout=children.PIPE, stderr=children.STDOUT, text=True)
    assert ran.returncode == 2
    assert ran.stdout.count("\n") == 1 and ran.stdout.endswith("got: no-such-job.\n"), ran.stdout
    return re.search(r"these jobs: ([\w -]+);", ran.stdout)[1].split()


def commands(workflow):
    """Yield each command of a workflow, with each value of its job's matrix."""
    for job in yaml.safe_load(workflow.read_text())["jobs"].values():
        matrix = job.get("strategy", {}).get("matrix", {})
        for run in [step["run"] for step in job["steps"] if "run" in step]:
            for value in matrix.get("job", [""]):
                yield run.replace("${{ matrix.job }}", value).split()


def test_workflows_run_every_job_of_the_gate(jobs):
    gate, nightly = (
        [*commands(ROOT / f".github/workflows/{name}.yml")] for name in ("gate", "nightly")
    )
    assert gate == [[".ci/run", job] for job in jobs]
    assert nightly == [[".ci/nightly"]]
    assert all((ROOT / command).stat().st_mode & 0o111 for command, *_ in gate + nightly)
