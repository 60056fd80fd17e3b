"""A bounded number of seeds that cover pairs of values of two axes.

Run as a script it looks for them: `python -m tests.oracle.pairs` prints the seeds to be put below.
"""

from __future__ import annotations

import itertools

from tests.oracle.case import AXES, Case, draw

DENSE = 14
"""Axes with odd values in such a case: most of them fall back, and must do so without a trace."""
LOOKED_AT = 4000
SEEDS = tuple(
    int(seed)
    for seed in """
0 491 1166 366 2163 3472 2055 1509 1228 3546 161 276 3434 2626 2884 3872 2628 1955 940 3440 2177
3651 2426 1409 2434 3250 3062 3523 1215 2406 3431 976 1866 835 2174 2744 3313 473 216 381 2385 1186
2272 3594 3592 2235 533 19 351 3243 2502 3617 1332 3730 1275 1206 2107 2397 677 1257 1529 3130 1061
359 518 304 918 1193 2676 1773 3511 451 33 3185 494 2285 1047 310 811 3462 2535 2633 690 1278 2618
3270 3747 691 815 1207 1660 662 980 3977 1380 2816 542 1681 2864 673 1382 2280 2629 3896 1484 1485
1990 426 1027 1785 3389 3454 3748 896 2456 3850 1978 2277 2297 2347 3057 2263 2915 3065 319 465 1602
1837 2172 24 1488 2582 2751 3175 3907 384 459 1384 1839 3168 3210 3620 3890 225 391 1791 2470 3004
3597 531 611 1187 1621 1907 2255 3008 3235 882 1567 2339 2382 2636 3301 3537 3558 680 935 3752 117
282 456 1109 1425 1453 1913 3043 3527 3536 3625 400 955 999 1194 1417 1720 3074 3501 3732 430 536
568 877 1212 1762 2392 3545 84 179 206 285 311 343 388 578 787 839 902 2467 3082 3328 3352 3723 61
63 160 167 168 274 1256 1327 1376 1683 1690 1716 3241 3585 199 392 419 437 532 781 809 1050 1185
1414 1858 2044 2188 2772 3467 3816 3827 6 28 56 133 171 197 228 252 305 428 524 632 732 869 874 962
1021 1901 2061 2191 2362 2403 2643 2675 2777 3601 2 3 67 106 111 115 170 244 375 399 458 472 506 616
625 701 823 923 949 991 1091 1232 1397 1468 1482 1566 2099 2268 2370 2668 2713 2914 3044 3384 3521
3560 3791 3919 13 37 43 48 74 85 87 99 103 152 182 184 187 193 195 229 289 300 303 463 486 580 593
643 735 748 772 939 1110 1134 1136 1266 1287 1396 1678 1706 1708 1747 1808 1854 1911 2054 2212 2270
2432 2520 3260 3976
""".split()
)
"""Found by `covering`: every pair that the first LOOKED_AT seeds have."""


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
