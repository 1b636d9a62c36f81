"""Make 100 ligands for docking: ten cores, each with ten groups. `python library.py FOLDER` writes `0.pdbqt` to `99.pdbqt` and `names.txt`."""

from __future__ import annotations

import sys
from pathlib import Path

from meeko import MoleculePreparation, PDBQTWriterLegacy
from rdkit import Chem
from rdkit.Chem import AllChem

CORES = (
    "c1ccc({})cc1", "c1cc({})ccn1", "c1cnc({})nc1", "c1ccc2cc({})ccc2c1", "c1ccc2nc({})ccc2c1",
    "c1ccc2[nH]c({})cc2c1", "c1ccc(-c2ccc({})cc2)cc1", "c1cnc2c({})cccc2c1", "c1ccc(Nc2nccc({})n2)cc1", "c1ccc2c(c1)ncnc2{}",
)  # fmt: skip
# Rings are numbered 9 here, because a core may be within its ring 1 or 2.
GROUPS = (
    "C(=O)Nc9ccccc9", "C(=O)NC", "NC(=O)c9ccccc9", "OCc9ccccc9", "CN9CCN(C)CC9",
    "N9CCOCC9", "S(=O)(=O)NC", "C#Cc9ccccc9", "c9cccnc9", "NCCO",
)  # fmt: skip


def pdbqt(smiles: str) -> str:
    """Return a ligand with hydrogens, a conformer from a fixed seed, charges and rotatable bonds, as Vina reads it."""
    molecule = Chem.AddHs(Chem.MolFromSmiles(smiles))
    AllChem.EmbedMolecule(molecule, randomSeed=18)
    AllChem.MMFFOptimizeMolecule(molecule)
    text, good, why = PDBQTWriterLegacy.write_string(MoleculePreparation().prepare(molecule)[0])
    if not good:
        raise SystemExit(f"{smiles}: {why}")
    return str(text)


def main(folder: Path) -> None:
    """Write all ligands."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [core.format(group) for core in CORES for group in GROUPS]
    for number, smiles in enumerate(names):
        (folder / f"{number}.pdbqt").write_text(pdbqt(smiles), encoding="utf-8")
    (folder / "names.txt").write_text("\n".join(names) + "\n", encoding="utf-8")
    print(f"{len(names)} ligands in {folder}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
