"""The files of docs/deploy agree with the server: metrics, routes, ports, flags and times."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from glowplug.core.config.operation_options import MetricsOptions
from glowplug.core.facts.machine import read_sheet
from glowplug.core.plan.plan import EnginePlan
from glowplug.core.plan.resolve import plan as make_plan
from glowplug.core.plugin.options import ServerOptions
from glowplug.core.plugin.registry import load_plugins
from glowplug.core.step.messages import Stats
from glowplug.entrypoints.cli.commands import serve
from glowplug.entrypoints.cli.flags.command_line import CommandLine, read_command_line
from glowplug.entrypoints.cli.flags.parser import Parser
from glowplug.entrypoints.server.metrics import GroupSeries, Metrics
from glowplug.entrypoints.server.routes import ROUTES
from glowplug.entrypoints.server.serve import FINAL_RESPONSE_SECONDS
from tests.e2e.serving import HTTP, served
from tests.support.published import with_shape
from tests.support.source_tree import ROOT

DEPLOY = ROOT / "docs" / "deploy"
DASHBOARD = DEPLOY / "grafana" / "dashboards" / "glowplug.json"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
#: seconds that the ranks may take to end after the last answers
END_OF_RANKS = 10
#: PromQL functions and words that are no labels of ours
GROUPING = re.compile(r"\bby \(([a-z_, ]+)\)")


# ---- dashboard -----------------------------------------------------------------------------------


def queries() -> list[tuple[str, str]]:
    """Return (panel, expression) of every query of the dashboard, those of variables included."""
    dashboard = json.loads(DASHBOARD.read_text())
    found = [
        (panel["title"], target["expr"])
        for panel in dashboard["panels"]
        for target in panel.get("targets", ())
    ]
    variables = dashboard["templating"]["list"]
    return [*found, *((v["name"], v["definition"]) for v in variables if "definition" in v)]


def test_every_metric_of_the_dashboard_is_exported() -> None:
    with served() as one:
        HTTP.post(one.url + "/v1/completions", json={"prompt": "say:abc", "max_tokens": 2})
        text = HTTP.get(one.url + "/metrics").text
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    series = set(kinds)
    for name, kind in kinds.items():
        if kind == "histogram":
            series |= {f"{name}_bucket", f"{name}_sum", f"{name}_count"}
    used = {name for _, query in queries() for name in re.findall(r"glowplug:\w+", query)}
    assert len(used) > 30 and used - series == set()
    for title, query in queries():
        for name in re.findall(r"(?:rate|increase)\((glowplug:\w+)", query):
            counts = kinds.get(name) == "counter" or re.search(r"_(bucket|sum|count)$", name)
            assert counts, f"{title}: the rate of {name}, which is a {kinds.get(name)}"


def test_labels_of_the_dashboard_are_labels_of_its_series() -> None:
    metrics = Metrics("m", Stats, MetricsOptions.model_validate({}), lambda: ())
    labels = {"model_name", "le"}
    for metric in metrics:
        labels |= set(getattr(metric, "labels", ()))
        labels |= {"group"} if isinstance(metric, GroupSeries) else set()
        labels |= {metric._label} if hasattr(metric, "_label") else set()
    for title, query in queries():
        named = {
            label.strip() for group in GROUPING.findall(query) for label in group.split(",")
        } | set(re.findall(r"[{,](\w+)=", query))
        assert named <= labels, title


def test_panels_have_their_places_and_sources() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) > 20
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells)) and all(x < 24 for x, _ in cells)
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    assert set(re.findall(r"\$\{?(\w+)", DASHBOARD.read_text())) <= variables | {
        "__rate_interval",
        "__range",
        "__all",
    }
    for panel in panels:
        for target in panel.get("targets", ()):
            assert target["datasource"]["uid"] == "${datasource}"


# ---- compose -------------------------------------------------------------------------------------


def compose(name: str = "compose.yaml") -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DEPLOY / name).read_text())
    return found


def with_defaults(text: str) -> str:
    """Return text with the defaults of compose's variables."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


def command_line(words: list[str]) -> CommandLine:
    assert words[0] == "serve"
    parser = Parser(prog="glowplug serve")
    serve.configure(parser)
    return read_command_line(parser.parse_args(words[1:]), load_plugins(entry_points=False))


@pytest.mark.parametrize("name", ["compose.yaml", "compose.gpu.yaml"])
def test_the_command_of_compose_is_planned(name: str) -> None:
    words = [with_defaults(word) for word in compose(name)["services"]["glowplug"]["command"]]
    plan = command_line([*words, "--facts", "cpu"]).plan()
    options = ServerOptions.model_validate(plan.config["server"])
    assert options.host == "0.0.0.0"
    (port,) = compose()["services"]["glowplug"]["ports"]
    assert port == f"127.0.0.1:{options.port}:{options.port}"
    (job,) = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"glowplug:{options.port}"]}]
    assert job["metrics_path"] in {route.path for route in ROUTES}
    grace = float(compose()["services"]["glowplug"]["stop_grace_period"].removesuffix("s"))
    assert grace >= options.drain_timeout + FINAL_RESPONSE_SECONDS + END_OF_RANKS


def test_compose_mounts_what_is_there_and_writes_nowhere_else() -> None:
    services = compose()["services"]
    for service in services.values():
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            assert not source.startswith(".") or (DEPLOY / source).exists(), volume
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:")
    own = services["glowplug"]
    assert own["read_only"] and own["cap_drop"] == ["ALL"]
    assert all(":exec" in place for place in own["tmpfs"]), "compiled kernels are loaded from there"
    assert (DEPLOY / own["build"]["context"] / "Dockerfile").resolve() == ROOT / "Dockerfile"


def test_grafana_finds_its_source_and_dashboard() -> None:
    folder = DEPLOY / "grafana" / "provisioning"
    (source,) = yaml.safe_load((folder / "datasources" / "prometheus.yaml").read_text())[
        "datasources"
    ]
    assert source["url"] == "http://prometheus:9090" and source["type"] == "prometheus"
    (provider,) = yaml.safe_load((folder / "dashboards" / "glowplug.yaml").read_text())["providers"]
    mounts = [volume.split(":") for volume in compose()["services"]["grafana"]["volumes"]]
    (mounted,) = (mount[0] for mount in mounts if mount[1] == provider["options"]["path"])
    assert (DEPLOY / mounted).resolve() == DASHBOARD.parent


# ---- Kubernetes ----------------------------------------------------------------------------------


class Manifest:
    """A manifest's objects, and the plan of its container."""

    def __init__(self, path: Path) -> None:
        objects = list(yaml.safe_load_all(path.read_text()))
        self.by_kind: dict[str, Any] = {one["kind"]: one for one in objects}
        assert len(self.by_kind) == len(objects) == 3
        self.deployment = self.by_kind["Deployment"]
        self.pod = self.deployment["spec"]["template"]["spec"]
        (self.container,) = self.pod["containers"]

    def plan(self, folder: Path) -> EnginePlan:
        """Plan the container's arguments, with its configuration, for a machine with its GPUs."""
        mounts = {mount["name"]: mount["mountPath"] for mount in self.container["volumeMounts"]}
        for name, text in self.by_kind["ConfigMap"]["data"].items():
            (folder / name).write_text(text)
        words = [word.replace(mounts["config"], str(folder)) for word in self.container["args"]]
        (model,) = (word for word in words if word.startswith("/models/"))
        assert model.startswith(mounts["models"] + "/")
        gpus = self.container["resources"]["limits"]["nvidia.com/gpu"]
        sheet = read_sheet("1xh200" if gpus == 1 else "8xh200")
        given = command_line([words[0], *with_shape(words[1:]), "--load-format", "dummy"])
        return make_plan(
            given.config,
            plugins=given.plugins,
            hardware=sheet,
            contributed={"executor.use": "multiprocess"},
        )


@pytest.fixture(params=MANIFESTS, ids=lambda path: path.name)
def manifest(request: pytest.FixtureRequest) -> Manifest:
    return Manifest(request.param)


@pytest.fixture
def plan(manifest: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EnginePlan:
    for variable in manifest.container["env"]:
        monkeypatch.setenv(variable["name"], "a-key")
    monkeypatch.chdir(ROOT)
    return manifest.plan(tmp_path)


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_kubernetes_knows_every_field(path: Path) -> None:
    """Against the oldest version that runs ``preStop.sleep`` by default, and the newest one."""
    schemas = pytest.importorskip(
        "kubernetes_validate", reason="pip install kubernetes-validate to run it"
    )
    objects = list(yaml.safe_load_all(path.read_text()))
    for version in ("1.30", schemas.latest_version()):
        for one in objects:
            schemas.validate(one, version, strict=True)
    wrong = yaml.safe_load(yaml.safe_dump(objects[1]))
    wrong["spec"]["template"]["spec"]["containers"][0]["livenesProbe"] = {}
    with pytest.raises(schemas.ValidationError):
        schemas.validate(wrong, "1.30", strict=True)


def test_there_is_one_for_one_gpu_and_one_for_several() -> None:
    counts = [
        Manifest(path).container["resources"]["limits"]["nvidia.com/gpu"] for path in MANIFESTS
    ]
    assert sorted(counts)[0] == 1 < sorted(counts)[-1]


def test_the_arguments_resolve_to_a_plan_over_all_gpus(
    manifest: Manifest, plan: EnginePlan
) -> None:
    assert plan.ranks == manifest.container["resources"]["limits"]["nvidia.com/gpu"]
    assert plan.device == "cuda"
    options = ServerOptions.model_validate(plan.config["server"])
    assert options.api_key == "a-key" and options.host == "0.0.0.0"


def test_ports_agree(manifest: Manifest, plan: EnginePlan) -> None:
    (port,) = manifest.container["ports"]
    assert port["containerPort"] == plan.config["server"]["port"]
    (service,) = manifest.by_kind["Service"]["spec"]["ports"]
    assert service["targetPort"] == port["name"]
    template = manifest.deployment["spec"]["template"]["metadata"]
    labels = template["labels"]
    assert manifest.by_kind["Service"]["spec"]["selector"].items() <= labels.items()
    assert manifest.deployment["spec"]["selector"]["matchLabels"].items() <= labels.items()
    scraped = template["annotations"]
    assert scraped["prometheus.io/port"] == str(port["containerPort"])
    assert scraped["prometheus.io/path"] in ServerOptions.model_validate({}).open_routes


def test_probes_need_no_key_and_wait_for_loading(manifest: Manifest) -> None:
    open_routes = ServerOptions.model_validate({}).open_routes
    paths = {
        name: manifest.container[name]["httpGet"] for name in ("livenessProbe", "readinessProbe")
    }
    assert paths["livenessProbe"]["path"] == "/health"  # 200 while the model loads
    assert paths["readinessProbe"]["path"] == "/ready"  # 503 while it loads and drains
    for probe in paths.values():
        assert probe["path"] in open_routes and probe["port"] == "http"
        assert probe["path"] in {route.path for route in ROUTES}


def test_the_grace_period_covers_the_drain(manifest: Manifest, plan: EnginePlan) -> None:
    drain = ServerOptions.model_validate(plan.config["server"]).drain_timeout
    before = manifest.container["lifecycle"]["preStop"]["sleep"]["seconds"]
    grace = manifest.pod["terminationGracePeriodSeconds"]
    assert grace >= before + drain + FINAL_RESPONSE_SECONDS + END_OF_RANKS


def test_the_container_has_few_rights_and_its_folders(manifest: Manifest) -> None:
    pod, own = manifest.pod["securityContext"], manifest.container["securityContext"]
    user = re.search(r"--uid (\d+) glowplug", (ROOT / "Dockerfile").read_text())
    assert user and pod["runAsUser"] == pod["fsGroup"] == int(user.group(1))
    assert pod["runAsNonRoot"] and pod["seccompProfile"] == {"type": "RuntimeDefault"}
    assert own["readOnlyRootFilesystem"] and not own["allowPrivilegeEscalation"]
    assert own["capabilities"] == {"drop": ["ALL"]}
    assert manifest.pod["automountServiceAccountToken"] is False
    mounts = {mount["name"]: mount for mount in manifest.container["volumeMounts"]}
    assert {volume["name"] for volume in manifest.pod["volumes"]} == mounts.keys()
    writable = {mount["mountPath"] for mount in mounts.values() if not mount.get("readOnly")}
    assert {"/home/glowplug", "/tmp"} <= writable
    resources = manifest.container["resources"]
    assert resources["limits"]["memory"] == resources["requests"]["memory"]
    if resources["limits"]["nvidia.com/gpu"] > 1:
        assert "/dev/shm" in writable, "NCCL's buffers"


def test_secrets_come_from_a_secret(manifest: Manifest) -> None:
    (variable,) = manifest.container["env"]
    assert variable["valueFrom"]["secretKeyRef"]["name"] == manifest.deployment["metadata"]["name"]
    (text,) = manifest.by_kind["ConfigMap"]["data"].values()
    assert f"${{{variable['name']}}}" in text and "--api-key" not in manifest.container["args"]
