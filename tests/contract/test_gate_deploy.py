"""The files of deploy/, each validated by a schema or tool of who reads it."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from sekisho.gate.claims import load_catalogue

ROOT = Path(__file__).parents[2] / "deploy"
MANIFESTS = sorted((ROOT / "kubernetes").glob("*.yaml"))
TEMPLATE = ROOT / "argo-rollouts" / "analysis-template.yaml"
ACTION = ROOT / "github-action" / "action.yml"
ALERTS = ROOT / "prometheus" / "alerts.yaml"
VERSION = "1.37"


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def validate(document: dict[str, Any]) -> None:
    kubernetes_validate.validate(document, VERSION, strict=True)


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_a_manifest_follows_the_schema_of_kubernetes(path: Path) -> None:
    assert documents(path)
    for document in documents(path):
        validate(document)


def test_the_schema_sees_a_planted_fault() -> None:
    [job] = [d for d in documents(ROOT / "kubernetes" / "gate-job.yaml") if d["kind"] == "Job"]
    job["spec"]["backofLimit"] = 0
    with pytest.raises(kubernetes_validate.ValidationError):
        validate(job)


def test_the_catalogue_of_the_config_map_loads(tmp_path: Path) -> None:
    [held] = [
        d for d in documents(ROOT / "kubernetes" / "gate-job.yaml") if d["kind"] == "ConfigMap"
    ]
    file = tmp_path / "catalogue.toml"
    file.write_text(held["data"]["catalogue.toml"])
    [model] = load_catalogue(file).models
    assert (model.name, model.window, len(model.engines)) == ("glm", 131072, 2)


def test_the_job_of_the_analysis_template_is_a_job() -> None:
    [template] = documents(TEMPLATE)
    [metric] = template["spec"]["metrics"]
    job = metric["provider"]["job"]
    validate({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "a"}, **job})
    used = set(re.findall(r"{{args\.([a-z-]+)}}", TEMPLATE.read_text()))
    assert used == {argument["name"] for argument in template["spec"]["args"]}
    # No retry: a finding is an answer, not an accident.
    assert (metric["failureLimit"], metric["count"], job["spec"]["backoffLimit"]) == (0, 1, 0)


def commands(node: Any) -> list[list[str]]:
    """Every ``command`` of a document that runs sekisho."""
    if isinstance(node, dict):
        own = node.get("command")
        found = [own] if isinstance(own, list) and own[0] == "sekisho" else []
        return found + [c for value in node.values() for c in commands(value)]
    if isinstance(node, list):
        return [c for value in node for c in commands(value)]
    return []


@pytest.mark.parametrize("path", [*MANIFESTS, TEMPLATE], ids=lambda path: path.name)
def test_every_option_in_a_manifest_exists(path: Path) -> None:
    import typer.main

    from sekisho.cli.gate import app

    check = typer.main.get_command(app).commands["check"]  # type: ignore[attr-defined]
    known = {option for parameter in check.params for option in parameter.opts}
    found = commands(documents(path))
    assert found
    for command in found:
        assert command[:3] == ["sekisho", "gate", "check"]
        options = [word.partition("=")[0] for word in command[3:] if word.startswith("--")]
        assert set(options) <= known


def test_the_action_follows_its_schema(tmp_path: Path) -> None:
    def checked(path: Path) -> int:
        words = ["check-jsonschema", "--builtin-schema", "vendor.github-actions", str(path)]
        beside = Path(sys.executable).parent / words[0]
        return subprocess.run([beside, *words[1:]], check=False, capture_output=True).returncode

    assert checked(ACTION) == 0
    broken = tmp_path / "action.yml"
    broken.write_text(ACTION.read_text().replace("using: composite", "using: compost"))
    assert checked(broken) == 1


@pytest.mark.parametrize(("code", "text"), [(0, "0"), (1, "1"), (3, "3")])
def test_the_script_of_the_action_keeps_the_exit_code(code: int, text: str, tmp_path: Path) -> None:
    """Run in bash as a step runs it, with a stand-in of the command that only ends."""
    [_, step] = yaml.safe_load(ACTION.read_text())["runs"]["steps"]
    fake = tmp_path / "sekisho"
    fake.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\nexit {code}\n')
    fake.chmod(0o755)
    output = tmp_path / "output"
    ran = subprocess.run(
        ["/bin/bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
        check=False,
        env={
            "PATH": f"{tmp_path}:/usr/bin:/bin",
            "CATALOGUE": "a b.toml",
            "SARIF": "out.sarif",
            "GITHUB_OUTPUT": str(output),
        },
    )
    assert ran.returncode == code
    assert output.read_text() == f"exit-code={text}\n"
    assert "--format sarif --output out.sarif -- a b.toml" in (tmp_path / "calls").read_text()


def test_the_alerts_fire_for_an_inversion_and_not_without(tmp_path: Path) -> None:
    series = [
        ('sekisho_gate_advertised_tokens{job="g",instance="i",model="glm"}', 4096),
        ('sekisho_gate_servable_tokens{job="g",instance="i",model="glm",role="prefill"}', 1018),
        ('sekisho_gate_servable_tokens{job="g",instance="i",model="glm",role="decode"}', 8192),
        ('sekisho_gate_advertised_tokens{job="g",instance="i",model="held"}', 4096),
        ('sekisho_gate_servable_tokens{job="g",instance="i",model="held",role="both"}', 4096),
    ]
    fired = {
        "exp_labels": {"severity": "critical", "job": "g", "instance": "i", "model": "glm"},
        "exp_annotations": {"summary": "glm advertises 4096 tokens, more than its pools hold"},
    }
    case = {
        "rule_files": [str(ALERTS)],
        "tests": [
            {
                "interval": "1m",
                "input_series": [{"series": s, "values": f"{v}x5"} for s, v in series],
                "alert_rule_test": [
                    {
                        "eval_time": "1m",
                        "alertname": "AdvertisedWindowAboveCapacity",
                        "exp_alerts": [fired],
                    }
                ],
            }
        ],
    }
    file = tmp_path / "alerts_test.yaml"
    file.write_text(yaml.safe_dump(case))
    for words in (["check", "rules", str(ALERTS)], ["test", "rules", str(file)]):
        ran = subprocess.run(["promtool", *words], check=False, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stdout + ran.stderr


def test_the_alerts_name_metrics_that_exist() -> None:
    exported = Path(__file__).parents[2] / "src" / "sekisho" / "gate" / "watch.py"
    names = set(re.findall(r'"(sekisho_gate_[a-z_]+)"', exported.read_text()))
    used = set(re.findall(r"sekisho_gate_[a-z_]+", ALERTS.read_text()))
    assert used and used <= names
