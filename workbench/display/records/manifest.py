"""A manifest for the eye: what it is, what to do with it, and its YAML without the packed files."""

from __future__ import annotations

from workbench.display.kit.doc import Code, Doc, Facts, Fold
from workbench.results.kubeflow.manifest import Manifest


def manifest_doc(manifest: Manifest) -> Doc:
    """State a manifest; its text is its YAML alone."""
    ranks = f", each with {manifest.slots} ranks" if manifest.slots > 1 else ""
    pairs = [
        ("nodes", f"{manifest.nodes}{ranks}"),
        ("image", manifest.image),
        ("results", manifest.results),
        ("objects", ", ".join(str(each["kind"]) for each in manifest.objects)),
        ("to a file", f"manifest.to_yaml('{manifest.name}.yaml')"),
    ]
    yaml = Code(manifest.to_text(folded=True))
    return Doc(blocks=[Facts(pairs, f"{manifest.kind} {manifest.name}"), Fold("YAML", [yaml])])
