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
0 680 137 949 891 677 351 1363 91 50 673 117 1207 531 905 293 19 1029 1327 706 679 1202 304 54
1215 874 1087 690 361 579 662 1390 426 419 1445 698 826 966 882 225 1186 240 1320 276 1334 1119
1484 310 1067 932 295 1384 211 269 536 473 317 604 36 622 575 1275 1409 738 1360 87 1494 1021
356 1441 332 940 1268 607 980 1187 898 1287 1350 1467 35 977 564 1296 643 927 1100 824 125 263
620 107 577 70 444 49 359 711 1453 85 190 287 735 1098 1367 60 167 511 700 832 1228 243 470 925
367 526 1366 179 202 595 1237 1485 166 583 887 144 238 760 999 1271 1378 175 671 982 1262 80 134
185 191 252 253 71 439 517 533 1102 1142 1386 1456 94 239 244 425 462 651 791 90 319 338 474 648
813 918 1135 1280 1435 27 45 277 556 781 784 1032 1225 1229 1429 24 209 212 559 745 799 816 934
1071 1283 1439 106 147 213 657 811 935 1027 1055 1208 63 64 84 124 161 232 305 330 499 570 616
619 739 897 1099 1123 1257 1355 1412 1428 28 72 227 348 408 438 637 686 691 793 837 910 950 953
976 1044 1144 1359 1405 1414 1468 10 99 103 148 197 251 259 308 331 475 484 492 497 498 630 659
670 855 1143 1264 1397 7 13 40 58 88 89 111 139 153 170 220 236 246 294 327 339 373 384 430 456
496 518 549 566 567 576 580 593 672 762 773 782 790 820 852 860 868 930 1022 1060 1082 1108 1146
1212 1216 1370 1399 1403 1421 1476 2 4 26 67 75 96 97 100 116 123 152 154 157 187 195 207 216
229 254 274 278 300 301 309 312 336 353 381 385 391 407 451 452 459 480 487 489 494 501 516 571
582 594 639 652 683 707 723 726 731 761 769 780 817 823 861 913 923 1002 1040 1063 1101 1110
1128 1134 1149 1183 1294 1302 1315 1369 1373 1396 1404
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
