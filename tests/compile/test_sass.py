"""The reading of SASS: which instructions a loop repeats."""

from tests.compile.aot import in_loops, parse_sass

# Two loops, the second within an outer one; what lies between is passed once in each round of the outer loop.
LISTING = """
	code for sm_80
        /*0000*/                   IMAD.MOV.U32 R1, RZ, RZ, c[0x0][0x28] ;     /* 0x00000a00ff017624 */
                                                                                /* 0x000fe400078e00ff */
        /*0010*/                   STL.64 [R1], R2 ;
        /*0020*/                   LDL.LU R3, [R1+0x8] ;
        /*0030*/               @P0 BRA 0x20 ;
        /*0040*/                   STL [R1+0x4], R2 ;
        /*0050*/                   BSSY B0, 0x70 ;
        /*0060*/              @!P1 BRA.U !UP0, 0x60 ;
        /*0070*/              @!P4 CALL.REL.NOINC 0x90 ;
        /*0080*/                   BRA 0x40 ;
        /*0090*/                   LDL R4, [R1] ;
        /*00a0*/               @P0 EXIT ;
        /*00b0*/                   BRA 0xd0 ;
        /*00c0*/                   EXIT ;
        /*00d0*/                   LDL R4, [R1] ;
        /*00e0*/                   BRA 0xc0 ;
        /*00f0*/                   BRA 0xf0 ;
"""


def test_instructions_of_a_listing():
    instructions = parse_sass(LISTING)
    assert list(instructions) == list(range(0, 0x100, 0x10))
    assert instructions[0x20] == "LDL.LU R3, [R1+0x8] " and instructions[0x70].startswith("@!P4 CALL")


# An outer loop whose inner ones make products, and hold a loop that waits.
NESTED = """
        /*0000*/                   STL [R1], R2 ;
        /*0010*/                   STL [R1], R2 ;
        /*0020*/                   HMMA.16816.F32 R4, R8, R12, R4 ;
        /*0030*/               @P0 BRA 0x30 ;
        /*0040*/               @P1 BRA 0x20 ;
        /*0050*/                   LDL R2, [R1] ;
        /*0060*/                   HGMMA.64x64x16.F32 R24, gdesc[UR4], R24 ;
        /*0070*/              @!P1 BRA 0x60 ;
        /*0080*/               @P1 BRA 0x10 ;
        /*0090*/                   EXIT ;
"""


def test_loops_are_what_control_comes_back_to():
    """Code behind a jump backwards that is passed once, as at 0xc0 to 0xe0, is none."""
    assert in_loops(parse_sass(LISTING)) == {0x20, 0x30, 0x40, 0x50, 0x60, 0x70, 0x80, 0xF0}


def test_of_nested_loops_those_that_make_products_count():
    assert in_loops(parse_sass(NESTED)) == {0x20, 0x30, 0x40, 0x60, 0x70}
