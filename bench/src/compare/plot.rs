//! [`Plot`]: medians over a logarithmic axis, with a bar from the smallest to the largest round, as SVG.

use anyhow::{Result, anyhow};
use plotters::prelude::*;

use crate::stats::Spread;

/// A plot. The first axis is logarithmic.
#[derive(Debug)]
pub(super) struct Plot {
    pub title: String,
    pub x_label: &'static str,
    pub y_label: String,
    /// Formats a value of the first axis.
    pub x_text: fn(u64) -> String,
    /// Whether the second axis is logarithmic too; otherwise it begins at 0.
    pub logarithmic: bool,
    /// Name and points of each line.
    pub lines: Vec<(String, Vec<(u64, Spread)>)>,
}

const SIZE: (u32, u32) = (860, 440);

const COLOURS: [RGBColor; 6] = [
    RGBColor(0x1f, 0x77, 0xb4),
    RGBColor(0xd6, 0x27, 0x28),
    RGBColor(0x2c, 0xa0, 0x2c),
    RGBColor(0x94, 0x67, 0xbd),
    RGBColor(0xff, 0x7f, 0x0e),
    RGBColor(0x55, 0x55, 0x55),
];

impl Plot {
    /// The plot as an SVG element.
    pub(super) fn svg(&self) -> Result<String> {
        let mut text = String::new();
        // The error of the library is not `Send`.
        self.draw(SVGBackend::with_string(&mut text, SIZE)).map_err(|error| anyhow!("{error}"))?;
        Ok(text)
    }

    fn draw(&self, backend: SVGBackend<'_>) -> Result<(), Box<dyn std::error::Error + '_>> {
        let y = |value: f64| if self.logarithmic { value.max(f64::MIN_POSITIVE).log10() } else { value };
        let x = |value: u64| (value.max(1) as f64).log2();
        let points = || self.lines.iter().flat_map(|(_, points)| points);
        let range = |values: &mut dyn Iterator<Item = f64>| {
            values.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), v| (low.min(v), high.max(v)))
        };
        let (left, right) = range(&mut points().map(|&(value, _)| x(value)));
        let (low, high) = range(&mut points().flat_map(|(_, s)| [y(s.min), y(s.max)]));
        let (low, high) = if self.logarithmic { (low - 0.1, high + 0.1) } else { (0.0, high * 1.1) };
        let root = backend.into_drawing_area();
        root.fill(&WHITE)?;
        let mut chart = ChartBuilder::on(&root)
            .caption(&self.title, ("sans-serif", 18))
            .margin(12)
            .x_label_area_size(42)
            .y_label_area_size(64)
            .build_cartesian_2d(left - 0.2..right + 0.2, low..high.max(low + 1e-9))?;
        let x_text = |value: &f64| (self.x_text)(value.exp2().round() as u64);
        let y_text = |value: &f64| {
            let value = if self.logarithmic { 10_f64.powf(*value) } else { *value };
            if value >= 10.0 { format!("{value:.0}") } else { format!("{value:.2}") }
        };
        chart
            .configure_mesh()
            .x_labels(12)
            .x_desc(self.x_label)
            .y_desc(&self.y_label)
            .x_label_formatter(&x_text)
            .y_label_formatter(&y_text)
            .light_line_style(WHITE)
            .draw()?;
        for ((name, points), colour) in self.lines.iter().zip(COLOURS.iter().cycle()) {
            let style = ShapeStyle { color: colour.to_rgba(), filled: true, stroke_width: 2 };
            chart
                .draw_series(LineSeries::new(points.iter().map(|(at, s)| (x(*at), y(s.median))), style))?
                .label(name)
                .legend(move |(at, y)| PathElement::new(vec![(at, y), (at + 18, y)], style));
            chart.draw_series(points.iter().map(|(at, s)| Circle::new((x(*at), y(s.median)), 3, style)))?;
            let bar = ShapeStyle { stroke_width: 1, ..style };
            chart.draw_series(
                points
                    .iter()
                    .map(|(at, s)| PathElement::new(vec![(x(*at), y(s.min)), (x(*at), y(s.max))], bar)),
            )?;
        }
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::UpperLeft)
            .background_style(WHITE.mix(0.8))
            .border_style(RGBColor(0xcc, 0xcc, 0xcc))
            .draw()?;
        root.present()?;
        drop(chart);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_line_and_label_is_drawn() {
        let spread = |median| Spread { median, min: median / 2.0, max: median * 2.0, count: 3 };
        for logarithmic in [false, true] {
            let plot = Plot {
                title: "A title".into(),
                x_label: "bytes",
                y_label: "us".into(),
                x_text: |x| x.to_string(),
                logarithmic,
                lines: vec![
                    ("first".into(), vec![(2, spread(1.0)), (1024, spread(4.0))]),
                    ("second".into(), vec![(1024, spread(3.0))]),
                ],
            };
            let svg = plot.svg().unwrap();
            assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"), "{svg}");
            for text in ["A title", "first", "second", "bytes", "us"] {
                assert!(svg.contains(text), "{text}: {svg}");
            }
            assert!(svg.matches("<circle").count() >= 3 && !svg.contains("NaN"), "{svg}");
        }
    }
}
