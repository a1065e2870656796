"""What a wheel requires (pyproject.toml): numpy, and the minor version of torch that it is built for."""

import os
import subprocess
import sys


def _torch():
    # pip builds with the interpreter that it installs for, and hides that one's packages by two variables alone.
    visible = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONNOUSERSITE")}
    ask = [sys.executable, "-c", "from importlib.metadata import version; print(version('torch'))"]
    for environment in (os.environ, visible):
        asked = subprocess.run(ask, env=environment, capture_output=True, text=True, check=False)
        if asked.returncode == 0:
            return "torch==" + ".".join(asked.stdout.split(".")[:2]) + ".*"
    return "torch>=2.11"  # of a source distribution; a build says what is missing (cmake/SmpWheel.cmake)


def dynamic_metadata(_settings, _project):
    """Called by scikit-build-core for the fields that it adds to `project`."""
    return {"dependencies": ["numpy", _torch()]}


def dynamic_wheel(_settings):
    """Called by it for the fields that differ between a source distribution and its wheels."""
    return {"dependencies": True}
