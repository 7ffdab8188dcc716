"""For `ray up` said again on machines that stand: so that the autoscaler on the head knows those that were added.

RAY_TMPDIR=/tmp python -P -m openbook.deployment.ray_machines
"""

from pathlib import Path

import yaml

BOOTSTRAP = Path("~/ray_bootstrap_config.yaml")
"""Which `ray up` has brought."""


def write_down(bootstrap: Path) -> None:
    """The autoscaler reads its config anew, but starts none but the machines of a file of state, which is made when it
    starts. Whoever makes a provider adds to that file what is new, and takes from it what is gone.
    """
    from ray.autoscaler._private.local.node_provider import LocalNodeProvider

    config = yaml.safe_load(bootstrap.expanduser().read_text())
    LocalNodeProvider(config["provider"], config["cluster_name"])


if __name__ == "__main__":
    write_down(BOOTSTRAP)
