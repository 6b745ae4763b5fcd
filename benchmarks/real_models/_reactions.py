"""Reactions whose atoms are mapped by construction: templates applied to molecules by RDKit.

Each atom of a product that RDKit builds says from which atom of which reactant it came. Reactants,
with a reagent and a solvent that give no atom, are written as RXNMapper reads them: canonical
SMILES in the order of the alphabet.
"""

import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from random import Random
from typing import Any

from benchmarks.real_models._packages import FOLDER

RDKIT = "rdkit==2026.9.1"  # a library of chemistry, and the only foreign code that runs
# The tokens of a reaction, as RXNMapper and rxnfp split it.
TOKENS = (
    r"\[[^\]]+]|Br?|Cl?|N|O|S|P|F|I|b|c|n|o|s|p|\(|\)|\.|=|#|-|\+|\\|\/|:|~|@|\?|>>?|\*|\$|"
    r"\%[0-9]{2}|[0-9]"
)
ARYL = (
    "c1ccccc1", "c1ccc(OC)cc1", "c1ccc(C)cc1", "c1cccc(F)c1", "c1ccc(C(F)(F)F)cc1", "c1ccncc1",
    "c1cccnc1", "c1ccc2ccccc2c1", "c1cccs1", "c1ccc(Cl)c(C)c1", "c1cc(OC)cc(OC)c1", "c1ccccc1OC",
    "c1ccc(C#N)cc1", "c1ccc(-c2ccccc2)cc1", "c1cnc(C)nc1", "c1ccc(N(C)C)cc1", "c1ccc2[nH]ccc2c1",
    "c1ccc(S(C)(=O)=O)cc1", "c1cc(C)cc(C)c1", "c1ccc(OC(F)F)c(F)c1",
)  # fmt: skip
ALKYL = (
    "CCCC", "CC(C)C", "C1CCCCC1", "CCOC", "Cc1ccccc1", "CCc1ccc(F)cc1", "CC1CCOCC1", "CCN(C)C",
    "Cc1ccncc1", "CCCC#N", "C1CCN(C)CC1", "CCc1c[nH]c2ccccc12", "CCS(C)(=O)=O", "CC1CC1",
    "Cc1ccc(OC)cc1", "C(C)c1ccccc1", "CCCN1CCOCC1", "Cc1ccco1", "CCC(F)(F)F", "CCCCOC",
)  # fmt: skip
SECONDARY = ("N1CCOCC1", "N1CCCCC1", "N1CCN(C)CC1", "CNCc1ccccc1", "N1CCCC1", "CNCCOC", "CCNCC")
REAGENTS = ("CCN(CC)CC", "CCN(C(C)C)C(C)C", "c1ccncc1", "[Pd]", "Cl", "O", "CC(=O)O")
SOLVENTS = ("CN(C)C=O", "C1CCOC1", "ClCCl", "CO", "CC#N", "CS(C)=O", "Cc1ccccc1", "C1COCCO1")
# Kind: the reactants, as beginnings that a rest completes, and the template.
Kind = tuple[Sequence[tuple[str, Sequence[str]]], str]
KINDS: dict[str, Kind] = {
    "amide coupling": (
        [("OC(=O)", ARYL), ("N", ALKYL)],
        "[C:1](=[O:2])[OX2H1].[NX3H2:3][C:4]>>[C:1](=[O:2])[N:3][C:4]",
    ),
    "esterification": (
        [("OC(=O)", ALKYL), ("O", ALKYL)],
        "[C:1](=[O:2])[OX2H1].[CX4:4][OX2H1:3]>>[C:1](=[O:2])[O:3][C:4]",
    ),
    "Suzuki coupling": (
        [("Br", ARYL), ("OB(O)", ARYL)], "[c:1]Br.[c:2]B(O)O>>[c:1]-[c:2]",
    ),
    "reductive amination": (
        [("O=C", ARYL), ("N", ALKYL)],
        "[c:5][CX3H1:1]=O.[NX3H2:2][C:3]>>[c:5][C:1][N:2][C:3]",
    ),
    "Buchwald amination": (
        [("Br", ARYL), ("", SECONDARY)],
        "[c:1]Br.[NX3H1:2]([C:3])[C:4]>>[c:1][N:2]([C:3])[C:4]",
    ),
    "ether synthesis": (
        [("O", ARYL), ("Br", ALKYL)], "[c:1][OX2H1:2].[CX4:3]Br>>[c:1][O:2][C:3]",
    ),
    "sulfonamide formation": (
        [("ClS(=O)(=O)", ARYL), ("N", ALKYL)],
        "[S:1](=[O:2])(=[O:3])Cl.[NX3H2:4][C:5]>>[S:1](=[O:2])(=[O:3])[N:4][C:5]",
    ),
    "urea formation": (
        [("O=C=N", ARYL), ("N", ALKYL)],
        "[O:1]=[C:2]=[N:3].[NX3H2:4][C:5]>>[O:1]=[C:2]([N:3])[N:4][C:5]",
    ),
    "Sonogashira coupling": (
        [("I", ARYL), ("C#C", ALKYL)], "[c:1]I.[CX2H1:2]#[C:3]>>[c:1][C:2]#[C:3]",
    ),
    "azide and alkyne": (
        [("[N-]=[N+]=N", ALKYL), ("C#C", ARYL)],
        "[N-:1]=[N+:2]=[N:3][C:6].[CX2H1:4]#[C:5]>>[n+0:1]1[n+0:2][n:3]([C:6])[c:4][c:5]1",
    ),
    "reduction of a nitro group": (
        [("O=[N+]([O-])", ARYL)], "[c:1][N+:2](=O)[O-]>>[c:1][N+0:2]",
    ),
    "loss of a Boc group": (
        [("CC(C)(C)OC(=O)N", ALKYL)], "[N:1]([C:2])C(=O)OC(C)(C)C>>[N:1][C:2]",
    ),
    "hydrolysis of an ester": (
        [("COC(=O)", (*ARYL, *ALKYL)), ("", ("O",))],  # the alcohol leaves with its oxygen
        "[C:1](=[O:2])O[CH3].[OH2:3]>>[C:1](=[O:2])[O:3]",
    ),
    "thioether synthesis": (
        [("S", ARYL), ("Br", ALKYL)], "[c:1][SX2H1:2].[CX4:3]Br>>[c:1][S:2][C:3]",
    ),
}  # fmt: skip
# The kinds that choose; all others are held out.
CHOOSING = tuple(KINDS)[::2]


def reactions(per_kind: int = 30, seed: int = 0) -> list[dict[str, Any]]:
    """Distinct reactions of each kind.

    Each has its `kind`, its `text`, and `atoms`: for each atom of the product its token, and the
    tokens of the reactant atoms that it may come from. These are several where atoms of one
    molecule look alike in its graph. `others` are all atoms before the arrow of the same
    element. Tokens count from 0, without special ones.
    """
    _install_rdkit()
    rng, sample = Random(seed), []
    for kind in KINDS:
        distinct: dict[str, dict[str, Any]] = {}
        while len(distinct) < per_kind:
            if drawn := _reaction(kind, rng):
                distinct[drawn["text"]] = drawn
        sample += distinct.values()
    return sample


def _install_rdkit() -> None:
    folder = FOLDER / "rdkit"
    if not folder.exists():
        with tempfile.TemporaryDirectory() as cache:
            pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--cache-dir", cache]
            subprocess.run([*pip, "--target", folder, RDKIT], check=True)
    sys.path.append(str(folder))


def _reaction(kind: str, rng: Random) -> dict[str, Any] | None:
    from rdkit import Chem, RDLogger  # type: ignore[import-not-found]
    from rdkit.Chem import AllChem  # type: ignore[import-not-found]

    RDLogger.DisableLog("rdApp.*")
    ends, template = KINDS[kind]
    mols = [Chem.MolFromSmiles(start + rng.choice(rests)) for start, rests in ends]
    outcomes = AllChem.ReactionFromSmarts(template).RunReactants(mols)
    if not outcomes:
        return None
    product = outcomes[0][0]
    if Chem.SanitizeMol(product, catchErrors=True):
        return None
    reagents = [Chem.MolFromSmiles(rng.choice(names)) for names in (REAGENTS, SOLVENTS)]
    parts = sorted((*_written(mol), number) for number, mol in enumerate([*mols, *reagents]))
    place: dict[tuple[int, int], int] = {}  # (reactant, atom) -> its token
    tokens: list[str] = []
    elements: dict[str, list[int]] = defaultdict(list)
    for smiles, order, number in parts:
        positions = _atoms(smiles)
        for atom, position in zip(order, positions, strict=True):
            place[number, atom] = len(tokens) + position
            symbol = [*mols, *reagents][number].GetAtomWithIdx(atom).GetSymbol()
            elements[symbol].append(len(tokens) + position)
        tokens += [*re.findall(TOKENS, smiles), "."]
    tokens[-1] = ">>"
    ranks = [list(Chem.CanonicalRankAtoms(mol, breakTies=False)) for mol in mols]
    smiles, order = _written(product)
    atoms = []
    for atom, position in zip(order, _atoms(smiles), strict=True):
        origin = product.GetAtomWithIdx(atom)
        number, index = origin.GetIntProp("react_idx"), origin.GetIntProp("react_atom_idx")
        alike = [n for n, rank in enumerate(ranks[number]) if rank == ranks[number][index]]
        atoms.append({
            "query": len(tokens) + position,
            "right": sorted(place[number, n] for n in alike),
            "others": sorted(elements[origin.GetSymbol()]),
        })  # fmt: skip
    return {"kind": kind, "text": "".join(tokens) + smiles, "atoms": atoms}


def _written(mol: Any) -> tuple[str, tuple[int, ...]]:
    """The canonical SMILES of a molecule, and its atoms in the order in which they stand there."""
    from rdkit import Chem

    smiles = Chem.MolToSmiles(mol)
    return smiles, tuple(mol.GetPropsAsDict(True, True)["_smilesAtomOutputOrder"])


def _atoms(smiles: str) -> list[int]:
    """The tokens of a SMILES that are atoms."""
    tokens = re.findall(TOKENS, smiles)
    return [n for n, token in enumerate(tokens) if token[0].isalpha() or token[0] == "["]
