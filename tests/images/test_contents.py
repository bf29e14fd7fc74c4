"""What goes into images, decided without an engine: their order and names, distributions, files, bytecode, SBOM."""

from __future__ import annotations

import importlib.util
import io
import json
import marshal
import os
import tarfile
from importlib import metadata
from pathlib import Path
from types import CodeType

import pytest

from fleetstart.images.context import SITE_PACKAGES, bytecode, write_context
from fleetstart.images.debian_root import NoDebian, add_plain, dependencies, interpreter_files, root_paths
from fleetstart.images.definitions import IMAGES, build_order, tag_of
from fleetstart.images.distributions import NotInstalled, closure, files_of, has_cuda, installed_extras, is_used
from fleetstart.images.sbom import sbom

FOLDER = Path(__file__).parents[2] / "images"


def test_parents_are_built_first() -> None:
    assert [image.name for image in build_order(["node"])] == ["base", "worker", "node"]
    assert [image.name for image in build_order(["controller"])] == ["base", "controller"]
    assert [image.name for image in build_order([])] == list(IMAGES)


def test_each_image_has_its_build_file_and_no_file_is_left_over() -> None:
    assert {path.name.removesuffix(".Dockerfile") for path in FOLDER.glob("*.Dockerfile")} == set(IMAGES)


@pytest.mark.parametrize("name", IMAGES)
def test_a_build_file_ends_as_the_unprivileged_user_and_says_how_health_is_known(name: str) -> None:
    text = (FOLDER / f"{name}.Dockerfile").read_text()
    users = [line.split()[1] for line in text.splitlines() if line.startswith("USER ")]
    assert users == (["10001:10001"] if name == "base" else [])
    assert ("\nHEALTHCHECK " in text) == (name != "base")


def test_images_for_cuda_are_told_by_their_tags() -> None:
    assert tag_of(IMAGES["node"], "1.2", cuda=True) == "fleetstart-node:1.2-cuda"
    assert tag_of(IMAGES["node"], "1.2", cuda=False) == "fleetstart-node:1.2"
    assert tag_of(IMAGES["controller"], "1.2", cuda=True) == "fleetstart-controller:1.2"
    assert has_cuda(["numpy", "nvidia-cuda-runtime-cu12", "torch"])
    assert not has_cuda(["numpy", "torch"])


# ── distributions ──────────────────────────────────────────────────────────────────────────────────


def test_an_image_has_what_its_extras_require_and_nothing_that_only_installs() -> None:
    server = closure(["server"])
    assert {"fleetstart", "starlette", "uvicorn", "redis", "botocore"} <= set(server)
    assert not {"torch", "pytest", "pip", "uv", "setuptools"} & set(server)
    assert "torch" in closure(["model"])


def test_an_extra_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = metadata.distribution

    def without_boto3(name: str) -> metadata.Distribution:
        if name == "boto3":
            raise metadata.PackageNotFoundError(name)
        return found(name)

    monkeypatch.setattr(metadata, "distribution", without_boto3)
    with pytest.raises(NotInstalled, match=r"fleetstart\[server\] needs boto3"):
        closure(["server"])
    assert installed_extras(["server", "container"]) == ["container"]


@pytest.mark.parametrize(
    ("path", "used"),
    [
        ("torch/nn/functional.py", True),
        ("torch/bin/torch_shm_manager", True),
        ("torch/bin/protoc", False),
        ("torch/include/ATen/ATen.h", False),
        ("torch/testing/_comparison.py", True),
        ("sympy/core/tests/test_expr.py", False),
        ("../../../bin/uvicorn", False),
        ("a/__pycache__/b.cpython-311.pyc", False),
        ("numpy/core/lib/libnpymath.a", False),
    ],
)
def test_files_that_no_running_program_needs_are_left_out(path: str, used: bool) -> None:
    assert is_used(path) == used


def test_a_distribution_without_a_list_of_its_files_is_named(tmp_path: Path) -> None:
    """Else the image would lack it. Debian's packages of Python have no RECORD."""
    info = tmp_path / "some-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: some\nVersion: 1.0\n")
    with pytest.raises(NotInstalled, match="some is installed without a list of its files"):
        list(files_of(metadata.Distribution.at(info)))


def test_own_files_are_found_in_an_editable_installation_too() -> None:
    paths = {path for path, _ in files_of(metadata.distribution("fleetstart"))}
    assert {
        "fleetstart/controller/app.py",
        "fleetstart/images/compose.yaml",
        "fleetstart/images/healthcheck.py",
    } <= paths
    assert any(path.startswith("fleetstart/native/_core.") for path in paths)
    assert any(path.endswith(".lua") for path in paths)
    assert any(path.endswith("dist-info/METADATA") for path in paths)
    assert not any(path.endswith((".cpp", "direct_url.json", ".pth")) for path in paths)


# ── the context ────────────────────────────────────────────────────────────────────────────────────


def test_bytecode_beside_a_module_is_taken_if_it_is_of_that_very_file(tmp_path: Path) -> None:
    source = tmp_path / "module.py"
    source.write_text("answer = 42\n")
    made = bytecode(source, "/in/the/image/module.py")
    assert made is not None
    code = marshal.loads(made[16:])
    assert isinstance(code, CodeType)
    assert code.co_filename == "/in/the/image/module.py"
    cached = Path(importlib.util.cache_from_source(str(source)))
    cached.parent.mkdir()
    cached.write_bytes(made + b"beside it")
    assert bytecode(source, "x") == made + b"beside it"
    source.write_text("answer = 43, a longer line\n")
    assert bytecode(source, "x") != made + b"beside it"
    source.write_text("no python at all")
    assert bytecode(source, "x") is None


def test_a_context_has_build_file_packages_with_bytecode_and_bill() -> None:
    adds = {"click": metadata.distribution("click"), "redis": metadata.distribution("redis")}
    first = write_context(IMAGES["controller"], adds=adds, has=adds)
    second = write_context(IMAGES["controller"], adds=adds, has=adds)
    assert first.file.read() == second.file.read(), (
        "the same packages are the same bytes: the engine's cache is by them"
    )
    assert first.distributions[0].startswith("click==")
    first.file.seek(0)
    with tarfile.open(fileobj=first.file) as tar:
        names = tar.getnames()
        assert {member.uid for member in tar} == {0}
        assert "FROM ${PARENT}" in tar.extractfile("Dockerfile").read().decode()  # type: ignore[union-attr]
        assert tar.getmember("fs").mode == 0o755
        assert len(names) == len(set(names))
        with tarfile.open(fileobj=tar.extractfile("packages.tar")) as packages:
            names = packages.getnames()
            assert {member.uid for member in packages} == {0}
            assert len(names) == len(set(names))
    modules = [name for name in names if name.endswith(".py")]
    assert "click/core.py" in modules
    assert {importlib.util.cache_from_source(name) for name in modules} <= set(names)
    assert SITE_PACKAGES.endswith("/site-packages")
    first.file.close()
    second.file.close()


@pytest.mark.slow
def test_a_bill_of_materials_is_valid_and_names_all_with_what_they_need() -> None:
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator  # late: two seconds of grammars

    has = closure(["server"])
    text = sbom(IMAGES["controller"], has, 1_700_000_000)
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    bill = json.loads(text)
    assert {part["purl"] for part in bill["components"]} == {f"pkg:pypi/{n}@{d.version}" for n, d in has.items()}
    assert bill["metadata"]["component"]["name"] == "fleetstart-controller"
    needed = {part["ref"]: part.get("dependsOn", []) for part in bill["dependencies"]}
    boto3 = next(ref for ref in needed if ref.startswith("boto3=="))
    assert any(one.startswith("botocore==") for one in needed[boto3])
    licences = {part["name"]: part.get("licenses") for part in bill["components"]}
    assert "BSD" in json.dumps(licences["click"])
    assert "BSD" in json.dumps(licences["cronsim"])  # which names it by a classifier alone


# ── a base of installed packages ───────────────────────────────────────────────────────────────────


def test_what_a_package_depends_on_comes_with_it_by_the_alternative_that_is_installed() -> None:
    installed = {
        "dash": "debianutils (>= 2), debconf (>= 0.5) | debconf-2.0",
        "debianutils": "libc6 (>= 2.34)",
        "libc6": "libgcc-s1, libcrypt1 (>= 1)",
        "libgcc-s1": "gcc-12-base, libc6",
        "gcc-12-base": "",
        "libcrypt1": ", ",
        "debconf": "perl-base",
        "perl-base": "",
        "tool": "absent | libcrypt1:any",
    }
    assert dependencies(["dash", "tool"], installed) == [
        "dash", "debianutils", "gcc-12-base", "libc6", "libcrypt1", "libgcc-s1", "tool",
    ]  # fmt: skip
    with pytest.raises(NoDebian, match="coreutils is not installed"):
        dependencies(["coreutils"], installed)


def test_a_root_depends_on_what_is_packed_alone_and_has_all_names_of_a_file(tmp_path: Path) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "gunzip").write_bytes(b"program")
    (folder / "gunzip").chmod(0o4755)
    (folder / "uncompress").hardlink_to(folder / "gunzip")

    def packed() -> bytes:
        file = io.BytesIO()
        with tarfile.open(fileobj=file, mode="w") as tar:
            for path in (folder, folder / "gunzip", folder / "uncompress"):
                add_plain(tar, str(path), str(path.relative_to(tmp_path)))
        return file.getvalue()

    before = packed()
    os.utime(folder, (1, 1))  # something else was installed
    assert packed() == before
    with tarfile.open(fileobj=io.BytesIO(before)) as tar:
        assert [(one.name, one.mode) for one in tar] == [
            ("bin", 0o755),
            ("bin/gunzip", 0o755),
            ("bin/uncompress", 0o755),
        ]
        second = tar.extractfile("bin/uncompress")
        assert second is not None
        assert second.read() == b"program"


def test_paths_of_packages_are_real_ones_without_documentation() -> None:
    assert root_paths(["/.", "/tmp", "/etc/passwd", "/usr/share/doc/dash", "/nowhere/to/be/found"]) == []
    assert root_paths(["/usr/../usr/bin/env"]) == ["/usr/bin/env"]


@pytest.mark.slow
def test_the_interpreter_comes_with_its_library_and_without_what_no_server_imports() -> None:
    found = interpreter_files()
    assert any(path.startswith("/usr/local/bin/python3") for path in found)
    assert any(path.endswith("/asyncio/base_events.py") for path in found)
    assert any("/libssl.so" in path for path in found)
    assert not any("/site-packages/" in path or "/test/" in path or "tkinter" in path for path in found)
    assert all(Path(source).exists() for source in found.values())
