"""`python -m pallas_flash`, for reports of bugs."""

import jax

import pallas_flash
from pallas_flash import __main__, __version__


def test_report_has_versions_device_and_choice(monkeypatch, tmp_path):
    monkeypatch.setenv("PALLAS_FLASH_TUNED", str(tmp_path / "tuned.json"))
    said = __main__.report()
    assert said.startswith(f"pallas_flash {__version__}, Python 3.")
    assert f"jax {jax.__version__}, " in said
    assert f"devices: {jax.device_count()} x cpu" in said
    assert f"tuned tiles: none in {tmp_path / 'tuned.json'}" in said
    assert "\nxla: " in said and "not triton: " in said and "not mosaic: " in said


def test_report_says_that_tuned_tiles_are_off(monkeypatch):
    monkeypatch.setenv("PALLAS_FLASH_TUNED", "0")
    assert "tuned tiles: switched off by PALLAS_FLASH_TUNED" in __main__.report()


def test_report_without_a_device_is_no_traceback(monkeypatch):
    def none(*_, **__):
        raise RuntimeError("no device")

    monkeypatch.setattr(jax, "devices", none)
    monkeypatch.setattr(pallas_flash, "explain", none)
    said = __main__.report()
    assert "devices: JAX finds none: RuntimeError('no device')" in said
    assert said.endswith("explain fails: RuntimeError('no device')")
