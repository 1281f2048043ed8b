"""Tables of `wikisql-mini`. Many tables share words, so a small model sees every word often.

A block is a table: plural name, columns (`#` marks numbers), and rows separated by `;`.
"""

from __future__ import annotations

MINI_TABLES = """
players | name, team, position, goals#, age#
Alma Reyes, Harbor City, forward, 21, 24; Boris Hahn, Harbor City, keeper, 0, 31;
Chloe Martin, North Park, defender, 4, 27; Dario Conti, North Park, forward, 17, 22;
Emma Larsen, Green Valley, midfielder, 9, 29; Farid Nasser, Green Valley, forward, 14, 26

teams | team, city, stadium, titles#, founded#
Harbor City, Lisbon, Dock Arena, 7, 1921; North Park, Oslo, Pine Field, 3, 1934;
Green Valley, Vienna, River Ground, 5, 1908; Red Hill, Madrid, Sun Park, 11, 1899;
Blue Lake, Geneva, Water Dome, 2, 1956; Old Town, Prague, Castle Field, 4, 1912

rivers | river, country, mouth, length#
Amber, Norway, North Sea, 320; Bramble, Spain, Silver Bay, 145; Cinder, Austria, Long Lake, 210;
Dorn, Norway, Silver Bay, 480; Elder, Portugal, West Ocean, 95; Fenn, Spain, West Ocean, 260

mountains | mountain, country, range, height#, first climbed#
White Tooth, Norway, Frost Range, 2410, 1876; Black Horn, Austria, Iron Range, 3120, 1865;
Eagle Top, Austria, Iron Range, 2890, 1902; Old Man, Spain, Sun Range, 1980, 1840;
Lone Peak, Chile, Fire Range, 5230, 1934; Twin Peak, Chile, Fire Range, 4870, 1951

cities | city, country, mayor, population#, area#
Lisbon, Portugal, Ines Costa, 545, 100; Oslo, Norway, Nils Berg, 700, 454; Vienna, Austria, Karl Mayer, 1900, 415;
Madrid, Spain, Lucia Vega, 3300, 604; Geneva, Switzerland, Paul Roche, 203, 16; Prague, Czechia, Jana Novak, 1300, 496

books | title, author, genre, pages#, year#
The Quiet Sea, Ines Costa, novel, 312, 1998; Night Train, Karl Mayer, mystery, 264, 2005;
Paper Moon, Emma Larsen, poetry, 96, 2012; Cold Harbor, Karl Mayer, mystery, 288, 2009;
Bread and Salt, Lucia Vega, cooking, 180, 2016; The Glass Hill, Emma Larsen, novel, 405, 2001

films | title, director, genre, minutes#, year#
Silver Rain, Paul Roche, drama, 118, 1987; Last Ticket, Jana Novak, comedy, 94, 1995;
The Lighthouse Keeper, Paul Roche, drama, 131, 2003; Red Desert Road, Omar Haddad, western, 107, 1978;
Two Left Shoes, Jana Novak, comedy, 89, 2010; Deep Signal, Mia Tanaka, mystery, 125, 2018

songs | song, singer, album, seconds#, chart position#
Blue Window, Mia Tanaka, Morning Light, 214, 3; Slow River, Omar Haddad, Long Road, 187, 12;
Dance Again, Mia Tanaka, Morning Light, 201, 1; Empty Street, Rosa Klein, City Nights, 240, 25;
Golden Hour, Rosa Klein, City Nights, 195, 7; Homeward, Omar Haddad, Long Road, 263, 18

albums | album, singer, label, tracks#, year#
Morning Light, Mia Tanaka, Star Records, 12, 2014; Long Road, Omar Haddad, River Music, 10, 2008;
City Nights, Rosa Klein, Star Records, 14, 2017; Old Letters, Leo Fontana, River Music, 9, 1999;
Winter Songs, Rosa Klein, Moon Sound, 11, 2019; First Steps, Leo Fontana, Moon Sound, 8, 1996

paintings | title, painter, museum, year#, price#
Yellow Field, Leo Fontana, City Museum, 1887, 40; Woman with Fan, Anna Weiss, Royal Gallery, 1902, 75;
Storm at Sea, Hugo Brandt, City Museum, 1854, 62; The Red Chair, Anna Weiss, Modern House, 1911, 88;
Winter Market, Hugo Brandt, Royal Gallery, 1849, 55; Blue Bottle, Leo Fontana, Modern House, 1893, 30

museums | museum, city, opened#, visitors#, rooms#
City Museum, Vienna, 1891, 640, 52; Royal Gallery, Madrid, 1819, 980, 120; Modern House, Oslo, 1963, 310, 28;
Sea Museum, Lisbon, 1934, 150, 19; Toy Museum, Prague, 1978, 85, 12; Clock Museum, Geneva, 1902, 110, 15

employees | name, department, office, salary#, years#
Nils Berg, sales, Oslo, 52, 6; Jana Novak, research, Prague, 61, 9; Omar Haddad, sales, Madrid, 48, 3;
Rosa Klein, finance, Vienna, 57, 11; Hugo Brandt, research, Vienna, 66, 14; Alma Reyes, support, Madrid, 39, 2

students | name, school, subject, grade#, age#
Tim Baker, Hill School, history, 7, 13; Sara Lind, Hill School, physics, 9, 14; Yuki Mori, Lake School, biology, 10, 15;
Ben Carter, Lake School, history, 6, 14; Nora Blum, West School, music, 8, 16; Ivan Petrov, West School, physics, 9, 15

schools | school, town, principal, pupils#, teachers#
Hill School, Ashford, Ruth Adams, 420, 31; Lake School, Milton, Peter Stone, 650, 44;
West School, Dunmore, Clara Wood, 380, 27; Park School, Ashford, Simon Reed, 510, 36;
Mill School, Kelso, Helen Ford, 240, 18; East School, Milton, David Marsh, 730, 52

courses | course, teacher, room, hours#, places#
Drawing, Anna Weiss, A1, 24, 15; Spanish, Lucia Vega, B2, 60, 20; Cooking, Paul Roche, C3, 18, 12;
Chess, Boris Hahn, A1, 30, 16; Photography, Mia Tanaka, D4, 36, 10; Singing, Rosa Klein, B2, 40, 25

dishes | dish, country, main ingredient, calories#, price#
fish soup, Portugal, cod, 280, 9; paella, Spain, rice, 450, 14; dumplings, Czechia, flour, 520, 8;
schnitzel, Austria, veal, 610, 16; fondue, Switzerland, cheese, 700, 22; salmon plate, Norway, salmon, 390, 19

restaurants | restaurant, city, kitchen, tables#, stars#
Blue Door, Lisbon, fish, 18, 4; Old Mill, Prague, local, 25, 3; Olive Tree, Madrid, Greek, 30, 4;
Golden Spoon, Vienna, French, 14, 5; Green Leaf, Oslo, vegetarian, 20, 4; Little Dragon, Geneva, Chinese, 32, 3

products | product, maker, color, price#, stock#
desk lamp, Lumo, white, 35, 120; office chair, Sitwell, black, 180, 44; bookcase, Woodline, brown, 140, 23;
floor lamp, Lumo, black, 75, 60; sofa, Sitwell, green, 620, 9; coffee table, Woodline, white, 95, 31

orders | order, customer, status, items#, total#
A101, Tim Baker, shipped, 3, 86; A102, Sara Lind, open, 1, 140; A103, Nora Blum, shipped, 5, 212;
A104, Ruth Adams, cancelled, 2, 64; A105, Peter Stone, open, 7, 305; A106, Tim Baker, returned, 1, 35

cars | model, maker, fuel, power#, price#
Swift, Norda, petrol, 95, 18; Comet, Norda, electric, 150, 34; Ranger, Volt Motors, diesel, 170, 41;
Spark, Volt Motors, electric, 110, 25; Breeze, Alpina, petrol, 75, 14; Falcon, Alpina, hybrid, 130, 29

flights | flight, origin, destination, airline, minutes#
X10, Oslo, Vienna, Polar Air, 145; X22, Lisbon, Madrid, Sun Wings, 80; X31, Prague, Geneva, Alpine Jet, 95;
X47, Madrid, Oslo, Polar Air, 225; X58, Vienna, Lisbon, Sun Wings, 210; X63, Geneva, Prague, Alpine Jet, 90

trains | train, origin, destination, platform#, minutes#
Blue Arrow, Vienna, Prague, 3, 240; Night Star, Madrid, Lisbon, 7, 600; Mountain Line, Geneva, Vienna, 1, 680;
Coast Runner, Lisbon, Porto, 4, 170; River Line, Prague, Brno, 2, 150; North Light, Oslo, Bergen, 5, 400

airports | airport, city, code, runways#, gates#
North Field, Oslo, NFO, 2, 60; Sun Coast, Lisbon, SCL, 1, 47; Central, Madrid, CMA, 4, 110; Danube, Vienna, DVI, 2, 95;
Lakeside, Geneva, LGE, 1, 38; Golden Hill, Prague, GHP, 3, 54

ships | ship, home port, type, length#, crew#
Sea Rose, Lisbon, ferry, 120, 45; Ice Queen, Bergen, icebreaker, 98, 60; Old Anchor, Porto, tug, 32, 8;
Wave Rider, Bergen, ferry, 140, 52; Grey Whale, Lisbon, tanker, 260, 28; Morning Star, Porto, trawler, 41, 12

bridges | bridge, river, type, length#, opened#
Stone Bridge, Amber, arch, 180, 1740; Iron Bridge, Dorn, truss, 320, 1889; Long Bridge, Fenn, cable, 950, 1998;
Kings Bridge, Bramble, arch, 140, 1805; New Bridge, Dorn, cable, 610, 2007; Mill Bridge, Elder, wooden, 60, 1921

towers | tower, city, architect, floors#, height#
Glass Needle, Oslo, Ingrid Solberg, 48, 190; Sun Tower, Madrid, Pablo Ortiz, 60, 245;
Twin Court, Vienna, Eva Lang, 35, 138; Clock House, Prague, Milan Dvorak, 12, 70;
Harbor One, Lisbon, Pablo Ortiz, 41, 160; Lake View, Geneva, Eva Lang, 29, 112

planets | planet, star, discoverer, moons#, mass#
Arda, Helion, Ingrid Solberg, 2, 14; Belos, Helion, Milan Dvorak, 0, 3; Cyra, Tavor, Eva Lang, 5, 90;
Doria, Tavor, Ingrid Solberg, 1, 8; Evenor, Mirage, Pablo Ortiz, 12, 310; Fara, Mirage, Milan Dvorak, 3, 27

missions | mission, agency, rocket, year#, crew#
Pioneer, North Agency, Titan, 1972, 3; Voyager, North Agency, Titan, 1979, 0; Skylark, Ocean Agency, Condor, 1985, 5;
Beacon, Ocean Agency, Condor, 1991, 2; Horizon, Union Agency, Phoenix, 2004, 6; Lantern, Union Agency, Phoenix, 2011, 4

animals | animal, home, food, weight#, lifespan#
brown bear, forest, berries, 300, 25; polar bear, ice, seals, 450, 28; red fox, forest, mice, 8, 5;
camel, desert, grass, 600, 40; sea otter, coast, crabs, 30, 15; snow owl, ice, mice, 2, 10

trees | tree, leaf, origin, height#, age#
oak, broad, Europe, 30, 600; pine, needle, Europe, 40, 300; baobab, broad, Africa, 22, 1200;
cedar, needle, Asia, 35, 900; maple, broad, America, 25, 200; redwood, needle, America, 95, 1800

dogs | dog, breed, owner, weight#, age#
Rex, shepherd, Tim Baker, 34, 5; Bella, poodle, Helen Ford, 12, 8; Lucky, terrier, Sara Lind, 9, 3;
Max, husky, Ivan Petrov, 27, 6; Daisy, beagle, Clara Wood, 11, 10; Rocky, shepherd, David Marsh, 38, 2

elections | district, winner, party, votes#, year#
Ashford, Ruth Adams, Green Party, 5120, 2012; Milton, David Marsh, Workers Party, 8400, 2012;
Dunmore, Clara Wood, Green Party, 4310, 2016; Kelso, Simon Reed, Liberal Party, 2750, 2016;
Ashford North, Helen Ford, Workers Party, 6090, 2020; Milton South, Peter Stone, Liberal Party, 7330, 2020

kings | king, house, capital, reign start#, years#
Alaric, Storm, Varn, 812, 21; Benno, Storm, Varn, 833, 9; Conrad, Lion, Tessel, 842, 34; Dagmar, Lion, Tessel, 876, 17;
Edwin, Oak, Corin, 893, 40; Falk, Oak, Corin, 933, 6

races | race, winner, country, laps#, distance#
Coast Prize, Nico Ferri, Portugal, 60, 290; Forest Prize, Jack Moore, Austria, 44, 310;
Desert Prize, Nico Ferri, Morocco, 57, 305; Snow Prize, Lars Holm, Norway, 38, 220;
City Prize, Jack Moore, Spain, 78, 260; Lake Prize, Lars Holm, Switzerland, 52, 280

swimmers | swimmer, country, style, medals#, best time#
Julia Ross, Norway, butterfly, 4, 58; Tom Hale, Spain, freestyle, 7, 49; Ada Young, Austria, backstroke, 2, 61;
Kim Soto, Chile, freestyle, 5, 51; Max Frey, Switzerland, breaststroke, 3, 63; Lena Voss, Austria, butterfly, 6, 57

games | game, studio, platform, players#, score#
Star Miner, Pixel Forge, console, 4, 86; Dragon Farm, Pixel Forge, mobile, 1, 72;
Night Racer, Loop Games, console, 8, 79; Word Maze, Loop Games, mobile, 2, 65;
Castle Siege, Iron Mouse, computer, 16, 91; Deep Cave, Iron Mouse, computer, 1, 83

programs | program, language, license, lines#, users#
Mailbird, Python, open, 4200, 900; Gridview, Java, closed, 15800, 2500; Notepad Pro, Rust, open, 7600, 1300;
Backupper, Python, closed, 2900, 450; Mapmaker, Java, open, 21000, 3100; Soundlab, Rust, closed, 9400, 700

hotels | hotel, city, owner, rooms#, price#
Grand Palace, Vienna, Karl Mayer, 210, 160; Sea View, Lisbon, Ines Costa, 85, 95;
Alpine Lodge, Geneva, Max Frey, 40, 130; City Inn, Prague, Milan Dvorak, 120, 70;
Royal Garden, Madrid, Lucia Vega, 175, 140; Fjord House, Oslo, Nils Berg, 60, 115

farms | farm, village, crop, hectares#, workers#
Sunny Field, Kelso, wheat, 140, 9; Stone Creek, Dunmore, apples, 35, 14; Long Meadow, Kelso, barley, 210, 11;
Hill Top, Ashford, potatoes, 60, 7; Old Orchard, Dunmore, cherries, 22, 16; West End, Milton, wheat, 95, 6

lakes | lake, country, fish, depth#, area#
Long Lake, Austria, trout, 85, 40; Clear Lake, Norway, salmon, 140, 75; Moon Lake, Chile, perch, 60, 22;
Mirror Lake, Switzerland, trout, 210, 130; Reed Lake, Spain, carp, 12, 9; Swan Lake, Czechia, pike, 30, 18
"""
