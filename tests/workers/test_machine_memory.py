"""Memory of the machine within the limits of the control groups around a process."""

import pytest

from mmrl.workers import memory


@pytest.mark.parametrize(
    ("lines", "files", "limit"),
    [
        ("0::/", {"memory.max": "max"}, None),
        ("0::/", {"memory.max": "5000"}, 5000),
        ("0::/user/job", {"memory.max": "max", "user/memory.max": "700", "user/job/memory.max": "900"}, 700),
        ("4:cpu,memory:/job\n0::/", {"memory/job/memory.limit_in_bytes": "300"}, 300),
        ("4:cpu:/job", {"job/memory.max": "300"}, None),
    ],
)
def test_the_tightest_limit_of_all_groups_counts(lines, files, limit, tmp_path, monkeypatch):
    root = tmp_path / "cgroup"
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (tmp_path / "own").write_text(lines + "\n")
    monkeypatch.setattr(memory, "CGROUP_OF_PROCESS", tmp_path / "own")
    limits = {name: place.replace("/sys/fs/cgroup", str(root)) for name, place in memory.CGROUP_LIMITS.items()}
    monkeypatch.setattr(memory, "CGROUP_LIMITS", limits)
    found = memory.machine_bytes()
    assert found == limit if limit else found > 10**6
