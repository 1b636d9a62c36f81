#!/bin/bash
# Renders the frame of this array element, under a name that says so, into the element's output folder.
set -e
frame=$PHALANX_ARRAY_TASK_ID
echo "frame $frame begins"
povray +Iscene.pov +W"$WIDTH" +H"$HEIGHT" +A0.2 +Q9 +WT1 +FN -D -GA \
  +K"$(awk "BEGIN { print $frame / $FRAMES }")" +O"$PHALANX_OUTPUT_DIR/part.png" >/dev/null 2>"$PHALANX_OUTPUT_DIR/povray.log" \
  || { tail -20 "$PHALANX_OUTPUT_DIR/povray.log"; exit 1; }
mv "$PHALANX_OUTPUT_DIR/part.png" "$PHALANX_OUTPUT_DIR/$(printf 'frame-%03d.png' "$frame")"
echo "frame $frame is there"
