"""Display of exports: a model in a folder or on the hub, or a run as a manifest, with its start."""

from __future__ import annotations

from collections.abc import Mapping

from workbench.base.json_values import as_float as json_number
from workbench.base.table import facts
from workbench.base.words import UNKNOWN, count, number, percent, scaled
from workbench.display.kit.doc import Block, Code, Doc, Fold, Heading, Note, Table
from workbench.finetune.export.folder import Export
from workbench.finetune.export.push import ModelCard, Pushed
from workbench.handover.kubeflow.manifest import Manifest


def export_doc(export: Export) -> Doc:
    pairs = [("folder", str(export.folder))]
    if export.base:
        pairs.append(("adapters of", export.base))
    pairs += _facts(export.files, export.dtype)
    blocks: list[Block] = [Table(facts("Exported model", pairs), width=100)]
    blocks += _start(export.start_lines)
    return Doc(blocks=blocks)


def pushed_doc(pushed: Pushed) -> Doc:
    pairs = [("model", pushed.url), ("commit", pushed.commit)]
    pairs += _facts(pushed.files, pushed.dtype)
    sizes = [(name, scaled(size, "B")) for name, size in pushed.files.items()]
    files = facts("Files", sizes)
    return Doc(
        blocks=[
            Table(facts("Pushed model", pairs), width=100),
            Table(files, width=100),
            *_start(pushed.start_lines),
        ]
    )


def model_card_doc(card: ModelCard) -> Doc:
    """State of a run what concerns others: neither hosts nor folders."""
    result = card.result
    job = card.job
    peft = "" if job.peft == "none" else f", {job.peft}"
    learned = [
        ("base model", card.base),
        ("revision of the base", card.job.model_revision or ""),
        ("dataset", card.dataset),
        ("trained", f"{result.technique}{peft}"),
        ("parameters", count(result.parameters)),
        ("trained parameters", count(result.trainable_parameters)),
        ("ranks", count(result.world_size)),
        ("optimizer steps", count(result.steps)),
        ("global batch size", count(result.global_batch_size)),
        ("learning rate", number(job.learning_rate)),
        ("precision in training", result.precision),
        ("number format of these weights", card.dtype),
    ]
    measured = [
        ("training loss, all steps", number(result.train_loss)),
        ("evaluation loss before the first step", number(result.first_eval_loss)),
        ("evaluation loss after the last", number(result.eval_loss)),
        ("perplexity", number(json_number(result.of_kind.get("perplexity")))),
        ("exact match", percent(json_number(result.of_kind.get("exact_match")))),
    ]
    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    return Doc(
        blocks=[
            Heading(card.repo_id.rpartition("/")[2], level=1),
            Note("Fine-tuned with DeepSpeed Workbench.", "plain"),
            *_start(card.start_lines),
            Table(facts("Training", _known(learned))),
            Table(facts("Measured in that run", _known(measured))),
            Note(f"Versions: {versions}"),
        ]
    )


def manifest_doc(manifest: Manifest) -> Doc:
    """State a manifest, with the YAML without packed files; the text is the YAML alone."""
    ranks = f", each with {manifest.slots} ranks" if manifest.slots > 1 else ""
    pairs = [
        ("nodes", f"{manifest.nodes}{ranks}"),
        ("image", manifest.image),
        ("results", manifest.results),
        ("objects", ", ".join(str(each["kind"]) for each in manifest.objects)),
        ("to a file", f"manifest.to_yaml('{manifest.name}.yaml')"),
    ]
    table = facts(f"{manifest.kind} {manifest.name}", pairs)
    yaml = Code(manifest.to_text(folded=True))
    return Doc(blocks=[Table(table), Fold("YAML", [yaml])])


def _facts(files: Mapping[str, int], dtype: str) -> list[tuple[str, str]]:
    total = scaled(sum(files.values()), "B")
    return [
        ("size", f"{total} in {len(files)} files"),
        ("number format", dtype),
    ]


def _start(lines: Mapping[str, str]) -> list[Block]:
    return [Code(line, f"With {program}") for program, line in lines.items()]


def _known(pairs: list[tuple[str, str]]) -> list[tuple[str, str]]:
    return [(name, text) for name, text in pairs if text not in ("", UNKNOWN)]
