"""A page of plain prose, from which prompts of an exact number of tokens are cut.

Owns the text only. It was written for perflab, so it can be shipped and stored freely.
"""

TEXT = """\
The harbour at Lindholm was built in three parts. The oldest quay, a curve of grey stone, was finished in \
the spring when the first grain ships came down from the north. Beside it the merchants raised a warehouse \
with iron doors, and behind the warehouse a street of narrow houses grew up the hill. The second quay is \
longer and lower. It was made for barges, which carry gravel, timber and salt along the coast and need \
shallow water more than shelter. The third is a floating platform, held by chains, where the ferry turns. \
Each part has its own crane, its own clock and its own habits, and the people who work there can tell from \
the sound of a bell which of them is late.

A bakery is a small factory that has to be right every morning. Flour arrives twice a week and is tested \
for water before it is mixed. The dough rests for fourteen hours in a cool room, because slow dough keeps \
its taste and forgives mistakes. At three the first oven is lit, at four the second, and by six the shelves \
must be full. When an oven fails the baker does not hurry the other one; he bakes fewer kinds of bread and \
tells the shops which ones they will get. Over a year this costs less than burnt loaves and angry customers.

Water moves through a city in a loop that nobody sees. Rain falls on roofs and streets, runs into pipes, and \
is led to a basin where sand and grass clean it. From there it seeps into the ground or is pumped to a tower \
on the highest hill. The tower is not there to store much water but to keep the pressure even: pumps can \
stop for an hour and no tap will notice. Engineers measure the level every minute. If it sinks faster than \
the pumps can explain, there is a leak, and the shape of the curve tells them how far away to look.

Suppose a library has one desk and one clerk. Readers arrive at random, and each wants between one and ten \
books. If the clerk serves them strictly in the order in which they came, a reader with a single book may \
wait behind ten long lists. If short lists go first, most readers are happier, but a patient scholar may \
never be served on a busy day. A fair rule lets each minute of waiting count for something, so that the long \
list climbs slowly to the front. The clerk can also fetch books for several readers in one walk through the \
stacks. The walk takes a little longer, yet every reader gets more books per hour, until the cart is full.

The observatory keeps two diaries. In the first the astronomers write what they expected to see before they \
open the dome; in the second, what they saw. The rule is old and was made after a famous error, in which a \
new star turned out to be a lamp on a fishing boat. A prediction that was written down cannot be bent to fit \
the night. Students find this tedious for a month and then cannot work without it. When the two diaries \
disagree, nobody is blamed; the page is copied, pinned to the wall, and someone is given a week to explain it.

Mountain trains use a third rail with teeth where the slope is steep. The engine does not pull harder there, \
it only stops slipping. Going down, the motors turn into brakes and give the current back to the line, so a \
full train that descends can lift a half empty one on the other side. The timetable is arranged for it. On \
days with fog the trains keep a greater distance, the exchange works less well, and the bill for electricity \
rises by a tenth, which is how the accountants learn about the weather.
"""
