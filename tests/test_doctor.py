"""experiments.doctor, on this machine and on one that lacks things."""

from experiments import doctor


def test_here(capsys):
    assert doctor.main() == 0
    out = capsys.readouterr().out
    assert "512 (512 is right)" in out and "all that is needed is there" in out
    assert "missing" not in out.partition("abilities")[0]


def test_what_lacks_is_said(monkeypatch, capsys):
    found = doctor.version
    monkeypatch.setattr(doctor, "version", lambda name: None if name in ("optax", "libtpu") else found(name))
    monkeypatch.setattr(doctor, "memory_bytes", lambda: 2**30)
    assert doctor.main() == 1
    out = capsys.readouterr().out
    assert "-- optax" in out and "missing: pip install -e ." in out
    assert "1.0 GiB: too little for a step" in out and "libtpu missing: pip install -e '.[tpu]'" in out
    assert out.splitlines()[-1] == "not well: optax, memory"


def test_requirements_by_extra():
    assert {"jax", "flax", "optax"} <= set(doctor.requirements(None))
    assert doctor.requirements("hf") == ["huggingface_hub"]
