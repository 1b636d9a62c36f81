// A planet with a ring of marbles; `clock` goes from 0 to 1 over the frames.
#version 3.7;
global_settings { assumed_gamma 1.0 max_trace_level 6 }
camera { location <0, 3.2, -8> look_at <0, 0.6, 0> angle 42 right x*image_width/image_height }
light_source { <-6, 9, -7> rgb 1.1 area_light x*2, y*2, 3, 3 adaptive 1 }
light_source { <8, 5, -3> rgb <0.25, 0.3, 0.4> shadowless }
sky_sphere { pigment { gradient y color_map { [0 rgb <0.85, 0.9, 1>] [1 rgb <0.2, 0.35, 0.7>] } } }
plane { y, -0.6 pigment { checker rgb 0.85 rgb 0.55 } finish { reflection 0.15 } }
sphere { <0, 1, 0>, 1.15
  pigment { bozo turbulence 0.6 color_map { [0.45 rgb <0.05, 0.2, 0.5>] [0.5 rgb <0.2, 0.5, 0.2>] [0.8 rgb <0.5, 0.4, 0.25>] } scale 0.7 }
  finish { specular 0.4 } rotate y*360*clock }
#declare Marble = 0;
#while (Marble < 14)
  #declare Angle = 2*pi*(Marble/14 + clock);
  sphere { <2.3*cos(Angle), 1 + 0.5*sin(2*Angle), 2.3*sin(Angle)>, 0.26
    pigment { rgb <0.5 + 0.5*sin(2*pi*Marble/14), 0.5 + 0.5*sin(2*pi*(Marble/14 + 1/3)), 0.5 + 0.5*sin(2*pi*(Marble/14 + 2/3))> }
    finish { specular 0.7 reflection 0.25 } }
  #declare Marble = Marble + 1;
#end
