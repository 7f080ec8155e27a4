"""Write what a deployment is made of as a CycloneDX file, from the packages that the lock file names.

``make sbom`` calls this: cyclonedx-bom lists the packages with the hashes of their files, and this adds what it cannot
know, the version of FedStrata and which packages it asks for itself. The same lock file gives the same bytes.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


def listed(lock: Path) -> dict[str, Any]:
    """Let cyclonedx-bom list the packages of a lock file."""
    command = ["requirements", str(lock), "--pyproject", str(ROOT / "pyproject.toml"), "--output-reproducible"]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "cyclonedx_py", *command, "--output-format", "JSON"],
        check=True,
        capture_output=True,
    )
    content: dict[str, Any] = json.loads(done.stdout)
    return content


def completed(content: dict[str, Any], version: str, asked: set[str]) -> dict[str, Any]:
    """Add the version, and the packages that are asked for; descriptions that repeat the lock file go."""
    root = content["metadata"]["component"]
    root["version"] = version
    for component in content["components"]:
        component.pop("description", None)
    direct = [component["bom-ref"] for component in content["components"] if component["name"] in asked]
    others = [entry for entry in content["dependencies"] if entry["ref"] != root["bom-ref"]]
    content["dependencies"] = [{"ref": root["bom-ref"], "dependsOn": sorted(direct)}, *others]
    return content


def asked_for(project: dict[str, Any], extra: str) -> set[str]:
    """Name the packages that FedStrata asks for itself, as an index writes them."""
    requirements = [*project["dependencies"], *project["optional-dependencies"][extra]]
    names = (re.match(r"[A-Za-z0-9._-]+", requirement) for requirement in requirements)
    return {re.sub(r"[-_.]+", "-", name[0]).lower() for name in names if name is not None}


def main() -> None:
    """Write the file beside the distributions."""
    [version] = re.findall(r'__version__ = "(.+)"', (ROOT / "fedstrata" / "_version.py").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    content = completed(listed(ROOT / "release" / "deployment.txt"), version, asked_for(project, "flower"))
    path = ROOT / "dist" / f"fedstrata-{version}.cdx.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n")
    print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
