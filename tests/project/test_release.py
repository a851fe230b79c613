"""The sdist, and the wheel that is built from it, read as archives."""

import email
import os
import re
import sys
import tarfile
import tomllib
import zipfile

import pytest
from packaging.metadata import Metadata
from support import children
from support.repository import MODULES, ROOT

import pallas_flash

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
VERSION = pallas_flash.__version__
STEM = f"pallas_flash-{VERSION}"


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    """The files of wheel and sdist, by name, with the sdist's folder taken off."""
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("dist")

    def build(kind, source):
        # In a process of its own, because a build backend works in the current folder.
        script = f"import sys, hatchling.build as x; x.build_{kind}(sys.argv[1])"
        command = [sys.executable, "-c", script, folder]
        children.run(command, cwd=source, check=True, capture_output=True)

    build("sdist", ROOT)
    unpacked = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(folder / f"{STEM}.tar.gz") as sdist:
        sdist.extractall(unpacked, filter="data")
    build("wheel", unpacked / STEM)
    assert sorted(os.listdir(folder)) == [f"{STEM}-py3-none-any.whl", f"{STEM}.tar.gz"]
    with zipfile.ZipFile(folder / f"{STEM}-py3-none-any.whl") as wheel:
        in_wheel = {name: wheel.read(name) for name in wheel.namelist()}
    with tarfile.open(folder / f"{STEM}.tar.gz") as sdist:
        in_sdist = {
            member.name.removeprefix(f"{STEM}/"): sdist.extractfile(member).read()
            for member in sdist
            if member.isfile()
        }
    return in_wheel, in_sdist


def test_the_wheel_has_the_package_alone(archives):
    wheel, _ = archives
    modules = {
        str(path.relative_to(ROOT))
        for name, path in MODULES.items()
        if name.split(".")[0] == "pallas_flash"
    }
    own = {name for name in wheel if not name.startswith(f"{STEM}.dist-info/")}
    assert own == modules | {"pallas_flash/py.typed"}
    assert f"{STEM}.dist-info/licenses/LICENSE" in wheel


def test_the_sdist_has_what_builds_and_tests_it(archives):
    wheel, sdist = archives
    assert {name for name in wheel if ".dist-info/" not in name} <= set(sdist)
    assert {str(path.relative_to(ROOT)) for path in MODULES.values()} <= set(sdist)
    assert {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "mkdocs.yml"} <= set(sdist)
    assert {str(path.relative_to(ROOT)) for path in ROOT.glob("docs/**/*.md")} <= set(sdist)
    assert not [name for name in sdist if name.startswith((".git/", "runs/", "dist/"))]


def test_metadata_is_complete_and_the_same_in_both(archives):
    wheel, sdist = archives
    assert wheel[f"{STEM}.dist-info/METADATA"] == sdist["PKG-INFO"]
    # It raises for a field that an index would refuse.
    Metadata.from_email(sdist["PKG-INFO"])
    metadata = email.message_from_bytes(sdist["PKG-INFO"])
    assert metadata["Name"] == "pallas-flash"
    assert metadata["Version"] == VERSION
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["Summary"] and metadata["Keywords"]
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_payload().startswith("# pallas_flash\n")
    assert "Typing :: Typed" in metadata.get_all("Classifier")
    assert metadata.get_all("Provides-Extra") == sorted(
        PYPROJECT["project"]["optional-dependencies"]
    )
    # Nobody and no address is invented.
    assert not {"Author", "Author-email", "Home-page", "Project-URL"} & set(metadata)


@pytest.mark.parametrize(
    ("extra", "names"),
    [
        ("", {"jax", "jaxtyping", "platformdirs"}),
        ("flax", {"flax"}),
        ("train", {"flax", "optax", "orbax-checkpoint"}),
        ("models", {"flax", "safetensors"}),
        ("dev", {"flax", "optax", "pytest"}),
    ],
)
def test_extras_have_what_they_are_for(archives, extra, names):
    needed = {
        x.name
        for x in Metadata.from_email(archives[1]["PKG-INFO"]).requires_dist
        if (x.marker.evaluate({"extra": extra}) if x.marker else not extra)
    }
    assert names == needed if extra in ("", "flax") else names < needed


def test_links_of_the_readme_hold_on_an_index(tmp_path):
    """By the commands of the release's workflow."""
    workflow = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    (script,) = re.findall(r"run: \|\n((?: {10}.*\n)*? {10,}.* README\.md\n)", workflow)
    (tmp_path / "README.md").write_text((ROOT / "README.md").read_text())
    site = {"GITHUB_SERVER_URL": "https://a.b", "GITHUB_REPOSITORY": "c/d", "GITHUB_REF_NAME": "v1"}
    children.run(["bash", "-ec", script], cwd=tmp_path, env=os.environ | site, check=True)
    links = re.findall(r"(!?)\[[^]]*\]\(([^)]*)\)", (tmp_path / "README.md").read_text())
    assert len(links) > 30
    for picture, link in links:
        here = f"https://a.b/c/d/{'raw' if picture else 'blob'}/v1/"
        path = link.removeprefix(here).split("#")[0]
        assert (ROOT / path).is_file() if "//a.b/" in link else link.startswith("https://"), link


def test_the_version_stands_in_one_place():
    """And is the newest of the changelog, unless that is not released."""
    assert PYPROJECT["project"]["dynamic"] == ["version"]
    assert "version" not in PYPROJECT["project"]
    released = re.findall(r"^## \[(\d[^]]*)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert not released or released[0] == VERSION
