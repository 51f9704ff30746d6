from verl_lab.cli.doctor import Finding, examine, optional, shared_memory


def named(findings):
    return {finding.name: finding for finding in findings}


def test_versions_devices_and_memory_are_all_there():
    found = named(examine())
    for name in ("python", "verl-lab", "torch", "cpu", "memory", "/dev/shm", "disk"):
        assert name in found
    assert "cpu:0" in found["cpu"].value


def test_a_missing_package_comes_with_the_command_that_gets_it():
    assert optional("no-such-package", "nothing", "pip install it") == Finding(
        "no-such-package", "missing: needed for nothing", "pip install it"
    )


def test_missing_shared_memory_says_what_is_used_instead(tmp_path):
    finding = shared_memory(tmp_path / "shm")
    assert finding.value.startswith("missing; weights go through")
    assert "tmpfs" in finding.advice
