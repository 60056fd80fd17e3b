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
0 3003 2314 2147 1979 609 1228 726 2308 3164 916 3032 1862 1605 2425 3347 3175 1734 2693 1130 2665
2649 3656 502 3262 2779 1270 3902 3039 677 2478 2526 1488 381 434 1094 2587 1866 1174 948 3952 2066
979 771 1289 3312 1768 1725 1023 1710 3132 743 3379 2987 3186 580 3321 3874 2924 3470 2620 846 3692
1572 3346 3805 280 3218 3214 1895 321 2983 767 1281 324 3876 348 271 3375 1820 409 3230 1525 3622
312 3406 1877 2003 2492 1766 2138 1087 3324 619 54 1490 380 2176 2506 2945 3350 96 181 700 246 2005
1627 2278 2879 3103 404 1711 2252 3504 633 812 884 3664 601 2364 2948 3088 714 879 1043 1610 2468
449 1184 1718 3831 3912 504 670 1790 3753 3867 1517 3033 3431 3440 201 540 1179 2664 2903 414 644
2541 3466 3754 1328 2854 2302 3071 83 1260 1623 2846 2947 3053 921 2169 2247 701 825 1819 2732 3376
3474 74 1066 1123 1361 1978 2228 2512 2545 3274 3654 318 1050 3448 3661 51 88 202 1250 2047 3740 4
125 391 621 816 856 1410 2254 3130 3579 984 1025 1113 1303 1334 1566 1899 2042 2159 2584 2686 2822
3674 3683 128 344 862 1567 1594 3369 3524 3536 3846 506 730 951 1372 1468 2237 2742 2931 232 403
473 615 766 785 1327 1350 2271 2452 13 722 728 746 845 1278 1489 2096 2122 2136 2359 2802 2957 2979
3203 3628 531 675 688 698 936 1233 1436 1573 1590 1630 2018 2313 2348 3023 3177 3332 3741 3990 235
453 523 638 653 863 912 1118 1368 1665 1777 1874 1936 1995 2076 2270 2511 2519 2785 3190 3547 3998
184 338 444 464 596 778 970 1217 1452 1501 1589 1640 1747 1913 1947 2088 2569 2834 3095 3124 3144
3417 3556 1 161 162 332 355 382 447 635 651 721 805 875 903 959 1034 1035 1397 1482 1493 1617 1624
1879 2023 2098 2266 2287 2471 2485 2844 2884 3192 3277 3392 3444 165 256 365 387 437 492 500 607
617 629 679 839 982 983 1056 1067 1090 1112 1286 1308 1330 1417 1673 1831 1952 2155 2172 2309 2402
2413 2450 2559 2832 2874 2999 3183 3202 3260 3610 44 48 151 163 179 185 187 188 217 231 276 393 405
429 625 660 665 708 719 853 860 960 995 1202 1257 1287 1314 1326 1353 1548 1577 1737 1749 1771 1922
2100 2149 2151 2214 2241 2282 2346 2386 2451 2801 2930 3028 3287 3290 3523 3537 3858 37 47 90 109
137 155 175 205 223 243 249 374 439 450 489 520 525 527 537 538 548 573 618 667 729 738 747 756 793
835 904 980 988 1083 1093 1114 1190 1401 1478 1495 1503 1541 1689 1800 1843 1938 1949 1967 2217
2290 2295 2353 2399 2637 2678 2680 3041 3835
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
