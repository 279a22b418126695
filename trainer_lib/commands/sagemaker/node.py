"""What an instance of a SageMaker job runs: a launch that knows its place among the instances."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from trainer_lib.commands.launch import launch

_PORT = 29500


def run(root: Path, arguments: Sequence[str]) -> int:
    """Launch the script, and return the exit code.

    Args:
        root: The folder that SageMaker fills: `/opt/ml`.
        arguments: The options of a launch, the script and its arguments.
    """
    resources = json.loads((root / "input" / "config" / "resourceconfig.json").read_text())
    hosts, here = resources["hosts"], resources["current_host"]
    variables: dict[str, str] = {
        "SM_CURRENT_HOST": here,
        "SM_HOSTS": json.dumps(hosts),
        "SM_MODEL_DIR": f"{root}/model",
        "SM_OUTPUT_DATA_DIR": f"{root}/output/data",
        **{f"SM_CHANNEL_{folder.name.upper()}": str(folder) for folder in (root / "input" / "data").iterdir()},
        **dict.fromkeys(("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"), resources.get("network_interface_name", "eth0")),
    }
    for name, value in variables.items():
        os.environ.setdefault(name, value)
    return launch.run([*_place(hosts, here), *arguments])


def _place(hosts: Sequence[str], here: str) -> list[str]:
    if len(hosts) == 1:
        return []
    place = {
        "num_machines": len(hosts),
        "machine_rank": hosts.index(here),
        "main_process_ip": hosts[0],
        "main_process_port": _PORT,
    }
    return [f"--{name}={value}" for name, value in place.items()]


if __name__ == "__main__":
    sys.exit(run(Path(sys.argv[1]), sys.argv[2:]))
