#!/bin/bash
# Docks the ligand of this array element from $LIGANDS; the same seed gives the same poses.
set -e
vina --receptor "$LIGANDS/receptor.pdbqt" --ligand "$LIGANDS/$PHALANX_ARRAY_TASK_ID.pdbqt" \
  --center_x 11 --center_y 90.5 --center_z 57.5 --size_x 22 --size_y 24 --size_z 28 --spacing 0.5 \
  --cpu 1 --seed 18 --exhaustiveness 1 --num_modes 1 --verbosity 0 --out "$PHALANX_OUTPUT_DIR/part"
mv "$PHALANX_OUTPUT_DIR/part" "$PHALANX_OUTPUT_DIR/pose-$PHALANX_ARRAY_TASK_ID.pdbqt"
