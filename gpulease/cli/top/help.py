"""The help screen of `gpulease top`."""

TEXT = """\

  arrows, PgUp, PgDn   select a row          Enter   open a job
  Tab, left, right     jobs or queue         Esc     back; show all rows again
  s, S                 sort by the next, or the previous column; r reverses
  /                    filter: text, user=NAME, gpu=N
  u, g, m              filter by user, by GPU, or show only yours
  Space                look at once          q       quit

  c cancel   e extend   k keep   a attach
                       are about the selected or the open job, and ask first

memory of a GPU, from left to right:
  name and #, or a full block    used under leases of that user
  = or a shade                   leased by that user, and not used
  ! or a checkered block         used without a lease
  . or a light shade             free
  x or a dark shade              not leased, but a job has the GPU alone

util, memory   the last minutes, ten seconds for each character

Esc closes this page.
"""
