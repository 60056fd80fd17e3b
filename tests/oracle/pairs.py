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
0 680 137 949 891 677 351 1363 91 50 673 629 293 271 1207 1193 1066 1327 114 1186 276 932 1494
1119 1481 579 925 103 491 202 1468 662 1409 229 379 359 1334 1324 622 1320 1484 419 660 729 536
582 1390 874 496 1215 87 1275 1029 1397 465 506 310 1380 1034 286 18 533 811 1419 107 142 700 85
326 361 27 690 1206 260 1228 575 1021 1414 94 1435 1471 277 498 1321 661 792 4 426 470 643 342
330 1486 877 1237 197 225 686 317 824 976 287 35 576 754 60 125 346 556 991 1120 1264 161 167
430 439 511 1238 304 444 779 117 175 193 611 934 1202 800 1027 1058 1063 210 517 801 803 30 343
760 927 1044 1055 1205 1387 84 148 401 755 111 147 279 327 333 462 516 782 823 887 63 108 492
886 1109 1235 1280 1287 1445 153 227 238 570 637 953 1091 1491 19 67 133 139 179 209 329 348 400
526 567 1136 51 80 200 244 584 594 619 880 965 1071 1110 1294 12 190 216 239 253 319 679 816 878
1277 1283 1378 24 56 134 168 213 230 311 338 583 587 604 935 985 1002 1062 1156 1162 64 70 99
124 305 367 474 530 563 603 657 735 837 852 855 947 980 1067 1143 1208 1219 1297 1428 10 13 65
72 76 77 102 106 109 152 155 220 228 232 237 300 308 385 407 451 459 480 542 571 620 691 707 777
861 901 930 970 977 999 1028 1108 1146 1175 1212 1236 1370 1403 1461 33 40 45 48 58 75 86 95 97
116 122 143 154 157 166 170 182 187 251 252 263 267 278 285 309 320 336 353 381 384 391 425 440
452 471 475 486 487 489 497 500 551 566 607 634 639 651 652 670 683 701 726 745 753 761 769 791
799 860 897 913 923 969 982 1040 1101 1128 1134 1183 1187 1194 1198 1302 1315 1355 1359 1396
1453 1476
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
