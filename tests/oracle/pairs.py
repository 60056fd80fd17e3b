"""A bounded number of seeds that cover pairs of values of two axes.

Run as a script it looks for them: `python -m tests.oracle.pairs` prints the seeds to be put below.
"""

from __future__ import annotations

import itertools

from tests.oracle.case import AXES, Case, draw

DENSE = 14
"""Axes with odd values in such a case: most of them fall back, and must do so without a trace."""
LOOKED_AT = 1500
SEEDS = tuple(
    int(seed)
    for seed in """
0 680 137 949 891 677 351 1363 91 50 673 117 1207 456 202 136 1485 1380 905 1215 781 690 662 888
1409 932 582 1426 276 811 1484 293 1047 925 1397 1114 643 491 1334 940 55 711 419 24 1275 1281
874 1287 19 408 679 1119 190 473 1186 575 607 1317 542 620 144 511 815 1102 1429 225 244 622 660
243 188 1494 1027 103 1067 1419 934 266 359 1467 556 1100 107 1087 1296 735 1205 1320 444 791
394 1169 85 595 976 1237 462 240 1360 175 310 492 760 1228 1257 35 966 496 882 980 1209 1376 167
295 432 977 1225 1189 125 792 1327 87 346 532 591 18 304 330 1099 49 236 246 305 472 927 1058
430 648 1120 1144 1185 36 287 338 518 571 1071 1138 1187 108 367 425 837 1414 71 148 213 563 579
619 664 1454 227 343 756 780 799 1142 1212 1370 46 54 64 70 97 147 252 253 277 309 559 604 691
699 1096 60 67 96 133 168 207 209 237 260 526 570 615 657 935 1235 1405 45 166 197 239 282 739
754 816 1062 1143 1278 1386 1412 13 27 179 221 361 379 409 594 730 813 950 1032 1176 1435 1461
1471 30 37 99 106 121 154 161 254 263 281 283 308 339 416 501 536 538 566 597 616 637 659 663
686 784 850 930 967 1021 1029 1037 1108 1134 1208 1297 1377 1439 1447 1453 34 63 100 112 114 139
157 170 220 234 296 336 356 373 392 426 470 471 474 494 517 533 549 567 753 773 832 855 999 1101
1136 1146 1271 1283 1294 1324 1338 1357 1359 1421 1428 1472 7 20 26 40 69 72 75 84 88 111 116
122 124 132 134 152 176 187 195 211 212 215 262 274 286 300 311 319 322 342 344 348 353 381 384
385 390 407 438 451 452 459 480 487 489 564 576 639 651 652 670 672 683 731 745 761 769 779 790
817 852 860 861 913 923 1002 1022 1040 1063 1098 1110 1128 1149 1183 1264 1302 1315 1355 1369
1373 1390 1396 1445 1476
""".split()
)
"""Found by `covering`: every pair that the first 1,500 seeds have."""


def pairs(case: Case) -> set[tuple[str, str, str, str]]:
    """Every two values of a case."""
    values = [(name, getattr(case, name)) for name in AXES]
    return {(*one, *other) for one, other in itertools.combinations(values, 2)}


def cases() -> list[Case]:
    """The cases of the seeds."""
    return [draw(seed, 1, DENSE) for seed in SEEDS]


def covering(most: int, seeds: int) -> tuple[list[int], int, int]:
    """Seeds, greedily: each has the most pairs that none before it had.

    Args:
        most: seeds to be found at most.
        seeds: how many are looked at.

    Returns:
        The seeds, how many pairs they cover, and how many all that were looked at do.
    """
    numbers: dict[tuple[str, str, str, str], int] = {}
    masks: dict[int, int] = {}
    for seed in range(seeds):
        found = pairs(draw(seed, 1, DENSE))
        masks[seed] = sum(1 << numbers.setdefault(pair, len(numbers)) for pair in found)
    gains = dict.fromkeys(masks, len(numbers))
    chosen: list[int] = []
    seen = 0
    while len(chosen) < most:
        best = max(gains, key=gains.__getitem__)
        true = (masks[best] & ~seen).bit_count()
        if true < gains[best]:  # a gain only shrinks: look again
            gains[best] = true
            continue
        if not true:
            break
        chosen.append(best)
        seen |= masks[best]
        del gains[best]
    return chosen, seen.bit_count(), len(numbers)


if __name__ == "__main__":
    print(*covering(10_000, LOOKED_AT))
