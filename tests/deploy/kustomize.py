"""As much of `kustomize build` as deploy/kuberay uses, where there is no binary; and the binary."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import yaml

Doc = dict[str, Any]


def read(file: Path) -> list[Doc]:
    return [doc for doc in yaml.safe_load_all(file.read_text()) if doc is not None]


def build(folder: Path) -> list[Doc]:
    """The documents of a kustomization and of all that it builds on, patched."""
    (settings,) = read(folder / "kustomization.yaml")
    unknown = settings.keys() - {"apiVersion", "kind", "namespace", "resources", "patches"}
    assert not unknown, f"{folder}: {unknown} is not built here"
    docs: list[Doc] = []
    for name in settings["resources"]:
        path = folder / name
        docs += build(path) if path.is_dir() else read(path)
    for patch in settings.get("patches", ()):
        target = patch["target"]
        found = [
            doc
            for doc in docs
            if (doc["kind"], doc["metadata"]["name"]) == (target["kind"], target["name"])
        ]
        assert len(found) == 1, f"{folder}: {target} is {len(found)} documents"
        changes = yaml.safe_load(patch["patch"])
        if isinstance(changes, dict):
            assert changes["$patch"] == "delete"
            docs.remove(found[0])
            continue
        for change in changes:
            apply(found[0], **change)
    if "namespace" in settings:
        for doc in docs:
            own = doc["kind"] == "Namespace"
            doc["metadata"]["name" if own else "namespace"] = settings["namespace"]
    return docs


def apply(doc: Doc, op: str, path: str, value: Any = None) -> None:
    """One operation of a JSON patch (RFC 6902)."""
    *parents, last = path.strip("/").split("/")
    at: Any = doc
    for key in parents:
        at = at[int(key)] if isinstance(at, list) else at[key]
    if isinstance(at, list):
        if op == "add":
            at.insert(len(at) if last == "-" else int(last), value)
        elif op == "replace":
            at[int(last)] = value
        else:
            del at[int(last)]
    elif op == "add":
        at[last] = value
    else:
        assert last in at, f"{path} is not there to {op}"
        at.pop(last)
        if op == "replace":
            at[last] = value


def binary() -> list[str] | None:
    """`kustomize build`, alone or inside kubectl."""
    if shutil.which("kustomize"):
        return ["kustomize", "build"]
    return ["kubectl", "kustomize"] if shutil.which("kubectl") else None


def build_with_binary(folder: Path) -> list[Doc]:
    command = binary()
    assert command is not None
    done = subprocess.run([*command, str(folder)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))
