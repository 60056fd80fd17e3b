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
0 680 137 949 891 677 351 1363 91 50 348 782 425 1494 905 608 103 679 19 607 1029 419 629 579
835 1397 575 70 1215 1334 643 211 662 1027 1320 1380 1484 874 673 1193 1435 1275 1119 276 1207
1409 286 491 1321 244 310 801 819 604 293 690 1344 219 886 1414 1169 811 72 225 1332 1176 1186
815 506 1287 686 564 470 533 1032 918 60 139 197 444 700 167 1062 960 277 319 108 287 304 342
346 426 1184 85 487 729 1087 1453 125 1485 735 944 1187 542 595 1082 218 326 619 1390 546 622
1216 1429 35 107 210 526 1114 1451 190 738 87 430 45 94 245 330 816 975 18 213 232 475 556 1229
30 106 202 496 711 799 803 24 260 263 657 760 1099 1456 4 305 367 492 511 570 620 791 820 1225
1437 71 252 436 1071 1189 1445 134 175 563 756 1021 117 240 271 359 379 408 517 534 623 925 976
991 1102 1257 1327 100 116 147 148 207 462 637 675 784 935 950 1135 1235 1291 28 84 109 179 208
281 532 580 599 927 967 1252 1268 1283 1471 64 67 153 227 392 464 536 566 627 754 855 887 920 77
99 102 111 161 188 194 253 317 339 356 361 400 456 510 567 576 671 813 852 910 930 934 965 999
1002 1143 1202 1355 1396 1399 1439 2 57 63 82 97 98 124 187 220 254 308 311 338 347 384 386 459
474 549 582 616 641 651 659 762 773 793 861 901 977 1044 1057 1063 1101 1108 1110 1118 1120 1136
1271 1297 1338 1359 1421 1428 10 26 40 58 61 68 88 96 152 154 157 166 195 216 229 251 267 269
278 300 309 336 353 381 385 407 452 473 489 498 516 541 551 594 639 652 670 672 683 707 745 761
769 837 860 906 913 923 966 982 1040 1098 1128 1134 1146 1183 1208 1212 1264 1294 1302 1315 1366
1369 1476
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
