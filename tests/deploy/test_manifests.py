"""deploy/kuberay: schemas, commands, recipes, and that numbers, labels and paths fit together."""

import re
import subprocess
import sys
import tomllib

import kubernetes_validate
import pytest
import yaml

from tests.deploy import kustomize
from tests.deploy.commands import DEPLOY, ROOT, config_of, parsed, words_of

KUBERAY = DEPLOY / "kuberay"
BUILT = ["base", "prepare", "job", "cluster", "overlays/cpu-smoke", "overlays/imagenet-8x8"]
JOBS = ["job", "overlays/cpu-smoke", "overlays/imagenet-8x8"]
CHECK = ROOT.parent / "shared" / "check-manifests"  # KubeRay's schemas; needs nothing of ours
OURS = ("ray.io/v1", "kustomize.config.k8s.io/v1beta1")


def ray_of(docs):
    """The spec of the Ray cluster."""
    (doc,) = [doc for doc in docs if doc["kind"] in ("RayJob", "RayCluster")]
    return doc["spec"].get("rayClusterSpec", doc["spec"])


def pods_of(docs):
    """(name, template) of every pod that the documents make."""
    for doc in docs:
        if doc["kind"] == "Job":
            yield "job", doc["spec"]["template"]
        if doc["kind"] in ("RayJob", "RayCluster"):
            spec = ray_of([doc])
            yield "head", spec["headGroupSpec"]["template"]
            for group in spec["workerGroupSpecs"]:
                yield "worker", group["template"]


def one(docs, kind, name):
    (found,) = [doc for doc in docs if (doc["kind"], doc["metadata"]["name"]) == (kind, name)]
    return found


def entrypoint(folder):
    return one(kustomize.build(KUBERAY / folder), "RayJob", "dps")["spec"]["entrypoint"]


@pytest.fixture(params=BUILT)
def docs(request):
    return kustomize.build(KUBERAY / request.param)


@pytest.mark.parametrize("file", sorted(KUBERAY.rglob("*.yaml")), ids=str)
def test_every_file_is_yaml_and_in_some_kustomization(file):
    assert kustomize.read(file)
    if file.name != "kustomization.yaml":
        (settings,) = kustomize.read(file.parent / "kustomization.yaml")
        assert file.name in settings["resources"]


@pytest.mark.skipif(kustomize.binary() is None, reason="neither kustomize nor kubectl is here")
@pytest.mark.parametrize("folder", BUILT)
def test_kustomize_builds_the_same(folder):
    def by_name(docs):
        return {(doc["kind"], doc["metadata"]["name"]): doc for doc in docs}

    built = by_name(kustomize.build_with_binary(KUBERAY / folder))
    assert built == by_name(kustomize.build(KUBERAY / folder))


@pytest.mark.parametrize("folder", BUILT)
def test_the_smoke_test_shares_nothing_with_the_runs(folder):
    """Whoever deletes it deletes its namespace, and the volumes there."""
    own = "dps-smoke" if folder == "overlays/cpu-smoke" else "dps"
    built = kustomize.build(KUBERAY / folder)
    one(built, "Namespace", own)
    assert {d["metadata"]["namespace"] for d in built if d["kind"] != "Namespace"} == {own}


def test_the_pages_delete_no_runs():
    pages = [*sorted(DEPLOY.rglob("README.md")), *sorted((ROOT / "docs").glob("*.md"))]
    deleted = [
        word
        for page in pages
        for word in re.findall(r"kubectl delete -k ([\w./-]+)", page.read_text())
    ]
    assert deleted
    assert all(word.endswith("overlays/cpu-smoke") for word in deleted)


@pytest.mark.skipif(not CHECK.exists(), reason="check-manifests is not beside the repository")
@pytest.mark.parametrize("folder", ["cluster", *JOBS])
def test_kuberay_takes_its_documents(folder, tmp_path):
    (tmp_path / "built.yaml").write_text(yaml.safe_dump_all(kustomize.build(KUBERAY / folder)))
    done = subprocess.run([sys.executable, CHECK, tmp_path], capture_output=True, text=True)
    assert done.returncode == 0 and "1 documents, 0 faults" in done.stdout, done.stdout


def test_kubernetes_takes_the_documents_and_the_pods_in_them(docs):
    """Strictly: a field that is not known is an error."""
    version = kubernetes_validate.latest_version()
    for doc in docs:
        if doc["apiVersion"] not in OURS:
            kubernetes_validate.validate(doc, version, strict=True)
    for name, template in pods_of(docs):
        pod = {"apiVersion": "v1", "kind": "Pod", **template}
        pod["metadata"] = {"name": name, **template["metadata"]}
        kubernetes_validate.validate(pod, version, strict=True)


def test_pods_have_no_rights(docs):
    for _, template in pods_of(docs):
        spec = template["spec"]
        pod = spec["securityContext"]
        assert pod["runAsNonRoot"] and pod["runAsUser"] > 0
        assert pod["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is False
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
        for container in (*spec["containers"], *spec.get("initContainers", ())):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert container["resources"]["requests"] == container["resources"]["limits"]
        assert not any("hostPath" in volume for volume in spec.get("volumes", ()))


def test_every_mount_has_its_volume_and_every_claim_is_there(docs):
    claims = {doc["metadata"]["name"] for doc in docs if doc["kind"] == "PersistentVolumeClaim"}
    for name, template in pods_of(docs):
        spec = template["spec"]
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        containers = [*spec["containers"], *spec.get("initContainers", ())]
        mounted = {mount["name"] for one in containers for mount in one["volumeMounts"]}
        assert mounted == volumes.keys()
        needed = {
            volume["persistentVolumeClaim"]["claimName"]
            for volume in volumes.values()
            if "persistentVolumeClaim" in volume
        }
        assert needed - {"imagenet-source"} <= claims  # that one is the user's own
        if name in ("head", "worker"):
            paths = {mount["mountPath"]: mount for mount in spec["containers"][0]["volumeMounts"]}
            assert volumes[paths["/dev/shm"]["name"]]["emptyDir"]["medium"] == "Memory"
            assert "emptyDir" in volumes[paths["/tmp"]["name"]]
            assert not paths["/runs"].get("readOnly")


def test_only_the_cluster_is_reached(docs):
    policy = one(docs, "NetworkPolicy", "dps")["spec"]
    selected = policy["podSelector"]["matchLabels"]
    assert set(policy["policyTypes"]) == {"Ingress", "Egress"}
    for _, template in pods_of(docs):
        assert selected.items() <= template["metadata"]["labels"].items()
    for rule in policy["ingress"]:
        assert rule["from"], "a rule without it lets everybody in"
        inside = rule["from"] == [{"podSelector": {"matchLabels": selected}}]
        assert inside or [port["port"] for port in rule["ports"]] in ([8265], [8080])


@pytest.mark.parametrize("folder", ["cluster", *JOBS])
def test_prometheus_finds_the_pods_and_is_let_in(folder):
    docs = kustomize.build(KUBERAY / folder)
    (settings,) = kustomize.read(DEPLOY / "prometheus" / "kubernetes.yml")
    (scrape,) = settings["scrape_configs"]
    (found,) = scrape["kubernetes_sd_configs"]
    (selector,) = found["selectors"]
    name, value = selector["label"].split("=")
    policy = one(docs, "NetworkPolicy", "dps")
    assert policy["metadata"]["namespace"] in found["namespaces"]["names"]
    kept = scrape["relabel_configs"][0]
    assert kept["source_labels"] == ["__meta_kubernetes_pod_container_port_number"]
    (port,) = [
        rule["ports"][0]["port"]
        for rule in policy["spec"]["ingress"]
        if "monitoring" in str(rule["from"])
    ]
    assert kept["regex"] == str(port)
    for _, template in pods_of(docs):
        assert template["metadata"]["labels"][name] == value
        ports = template["spec"]["containers"][0]["ports"]
        assert {"name": "metrics", "containerPort": port} in ports


@pytest.mark.parametrize("folder", ["cluster", *JOBS])
def test_ray_asks_for_a_token_and_has_our_versions(folder):
    docs = kustomize.build(KUBERAY / folder)
    ray = ray_of(docs)
    assert ray["authOptions"] == {"mode": "token"}
    pins = (ROOT / "constraints.txt").read_text()
    assert f"\nray=={ray['rayVersion']}\n" in pins
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    for _, template in pods_of(docs):
        spec = template["spec"]
        for container in (*spec["containers"], *spec.get("initContainers", ())):
            assert container["image"] == f"dps-dist:{version}"


def test_the_cluster_that_stays_is_that_of_the_job():
    staying, own = (kustomize.build(KUBERAY / folder) for folder in ("cluster", "job"))
    assert ray_of(staying) == ray_of(own)


@pytest.mark.parametrize("folder", JOBS)
def test_the_entrypoint_starts_a_run_and_resumes_it(folder, tmp_path):
    line = entrypoint(folder)
    options = parsed(words_of(line, tmp_path))
    assert options["command"] == "train" and not options["resume"]
    assert options["out"] == "/runs"
    run = tmp_path / options["name"]
    run.mkdir()
    (run / "config.yaml").touch()
    again = parsed(words_of(line, tmp_path))
    assert again == {**options, "resume": True}


@pytest.mark.parametrize("folder", JOBS)
def test_the_numbers_fit(folder):
    docs = kustomize.build(KUBERAY / folder)
    ray = ray_of(docs)
    (group,) = ray["workerGroupSpecs"]
    assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    config = config_of(parsed(words_of(entrypoint(folder))))
    least, most = config.launch.worker_range
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    gpus, cpus = int(limits.get("nvidia.com/gpu", 0)), int(limits["cpu"])
    a_node = gpus or cpus // int(config.launch.cpus_per_worker)
    assert most == a_node * group["maxReplicas"]
    assert least >= a_node * group["minReplicas"]
    assert a_node * config.launch.cpus_per_worker <= cpus
    if least == most:
        assert config.data.batch_size % most == 0
        assert group["replicas"] == group["maxReplicas"]
    kept = one(docs, "PodDisruptionBudget", "dps-workers")["spec"]["minAvailable"]
    assert kept == max(1, group["replicas"] - 1)
    memory = parse_gi(limits["memory"])
    spec = group["template"]["spec"]
    shm = {volume["name"]: volume for volume in spec["volumes"]}["shm"]["emptyDir"]["sizeLimit"]
    store = int(group["rayStartParams"]["object-store-memory"])
    assert store < parse_gi(shm) < memory


def test_a_node_has_room_for_the_copy():
    (group,) = ray_of(kustomize.build(KUBERAY / "overlays/imagenet-8x8"))["workerGroupSpecs"]
    spec = group["template"]["spec"]
    on_disk = [volume.get("emptyDir", {"medium": "Memory"}) for volume in spec["volumes"]]
    sizes = [parse_gi(one["sizeLimit"]) for one in on_disk if one.get("medium") != "Memory"]
    assert len(sizes) == 2  # data and /tmp
    requests = spec["containers"][0]["resources"]["requests"]
    assert parse_gi(requests["ephemeral-storage"]) > sum(sizes)


def parse_gi(text):
    return int(re.fullmatch(r"(\d+)Gi", text)[1]) * 2**30


@pytest.mark.parametrize("folder", JOBS)
def test_the_data_is_where_the_run_reads_it(folder):
    docs = kustomize.build(KUBERAY / folder)
    config = config_of(parsed(words_of(entrypoint(folder))))
    (group,) = ray_of(docs)["workerGroupSpecs"]
    mounts = group["template"]["spec"]["containers"][0]["volumeMounts"]
    assert any(config.data.path.startswith(f"{mount['mountPath']}/") for mount in mounts)
    for container in group["template"]["spec"].get("initContainers", ()):
        said = " ".join([*container["command"], *container.get("args", ())])
        assert config.data.path in said
        if container["command"][0] == "dps":
            options = parsed(container["command"])
            assert options["source"] == config.data.source
            assert str(options["out"]) == config.data.path


def test_the_copy_brings_every_file(tmp_path):
    """Its script, run here between two folders."""
    docs = kustomize.build(KUBERAY / "overlays/imagenet-8x8")
    (group,) = ray_of(docs)["workerGroupSpecs"]
    (copy,) = group["template"]["spec"]["initContainers"]
    shared = tmp_path / "shared" / "imagenet"
    shared.mkdir(parents=True)
    names = {"train.beton", "train.parquet", "val.beton", "val.parquet"}
    for name in names:
        (shared / name).write_text(name)
    (script,) = copy["args"]
    moved = script.replace("/shared", f"{tmp_path}/shared").replace("/data", f"{tmp_path}/data")
    subprocess.run([*copy["command"], moved], check=True)
    copied = tmp_path / "data" / "imagenet"
    assert {file.name: file.read_text() for file in copied.iterdir()} == {
        name: name for name in names
    }


def test_prepare_is_a_command_that_is_there():
    job = one(kustomize.build(KUBERAY / "prepare"), "Job", "dps-prepare")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    options = parsed(container["command"])
    assert options["source"] == "imagefolder" and str(options["out"]) == "/data/imagenet"
