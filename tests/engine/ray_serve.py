"""Serves deploy/ray-serve on this machine: ``python -m tests.engine.ray_serve``.

Arguments: the ports of HTTP and of Ray's metrics. It ends when its stdin is closed.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import ray
from ray import serve

APP = Path(__file__).parents[2] / "deploy" / "ray-serve" / "app.py"


def main() -> None:
    """Start Ray and the app, and wait."""
    port, metrics_port = map(int, sys.argv[1:])
    ray.init(
        "local", num_cpus=4, _metrics_export_port=metrics_port, include_dashboard=False
    )
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(runpy.run_path(str(APP))["app"])
    print("serving", flush=True)
    sys.stdin.read()
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
