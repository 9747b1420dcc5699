//! [`Page`]: the output of a run, as Markdown or as one HTML file.

use std::fmt::Write as _;

use super::plot::Plot;

/// A page.
#[derive(Debug, Default)]
pub(super) struct Page {
    pub title: String,
    pub sections: Vec<Section>,
}

/// A heading with paragraphs, tables and plots below it.
#[derive(Debug, Default)]
pub(super) struct Section {
    pub heading: String,
    pub paragraphs: Vec<String>,
    pub tables: Vec<Table>,
    pub plots: Vec<Plot>,
}

/// A table; each row has as many cells as the head.
#[derive(Debug, Clone, Default)]
pub(super) struct Table {
    pub head: Vec<String>,
    pub rows: Vec<Vec<String>>,
}

impl Table {
    /// The first table of a page in Markdown, without emphasis; `None` if the page has no table, or not a whole one.
    pub(super) fn first_of(markdown: &str) -> Option<Self> {
        let cells = |line: &str| -> Vec<String> {
            let line = line.trim().trim_start_matches('|').trim_end_matches('|');
            line.split('|').map(|cell| cell.trim().replace("**", "")).collect()
        };
        let is_row = |line: &&str| line.starts_with('|');
        let mut lines = markdown.lines().skip_while(|line| !is_row(line)).take_while(is_row);
        let head = cells(lines.next()?);
        lines.next()?;
        let rows: Vec<_> = lines.map(cells).collect();
        let whole = !rows.is_empty() && rows.iter().all(|row| row.len() == head.len());
        whole.then_some(Self { head, rows })
    }
}

impl Page {
    /// The page in Markdown, without plots.
    pub(super) fn markdown(&self) -> String {
        let mut text = format!("# {}\n", self.title);
        for section in &self.sections {
            let _ = writeln!(text, "\n## {}", section.heading);
            for paragraph in &section.paragraphs {
                let _ = writeln!(text, "\n{}", wrap(paragraph));
            }
            for table in &section.tables {
                let line = |cells: &[String]| format!("| {} |", cells.join(" | "));
                let _ = writeln!(text, "\n{}\n|{}", line(&table.head), "---|".repeat(table.head.len()));
                for row in &table.rows {
                    let _ = writeln!(text, "{}", line(row));
                }
            }
        }
        text
    }

    /// The page as one HTML file that refers to no other.
    pub(super) fn html(&self) -> anyhow::Result<String> {
        let title = escape(&self.title);
        let mut text = format!(
            "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<title>{title}</title>\n\
             <style>{STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>\n"
        );
        for section in &self.sections {
            let _ = writeln!(text, "<h2>{}</h2>", escape(&section.heading));
            for paragraph in &section.paragraphs {
                let _ = writeln!(text, "<p>{}</p>", escape(paragraph));
            }
            for plot in &section.plots {
                let _ = writeln!(text, "<figure>{}</figure>", plot.svg()?);
            }
            for table in &section.tables {
                text.push_str("<table>\n");
                row(&mut text, "th", &table.head);
                table.rows.iter().for_each(|cells| row(&mut text, "td", cells));
                text.push_str("</table>\n");
            }
        }
        text.push_str("</body>\n</html>\n");
        Ok(text)
    }
}

const STYLE: &str = "body{font:15px/1.45 sans-serif;max-width:75em;margin:2em auto;padding:0 1em;color:#222}\
table{border-collapse:collapse;margin:1em 0}th,td{border:1px solid #ccc;padding:.25em .6em;text-align:right}\
th{background:#f2f2f2}th:first-child,td:first-child{text-align:left}figure{margin:1em 0}p{max-width:55em}";

fn row(text: &mut String, cell: &str, cells: &[String]) {
    text.push_str("<tr>");
    for content in cells {
        let _ = write!(text, "<{cell}>{}</{cell}>", escape(content));
    }
    text.push_str("</tr>\n");
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// Width of a line of text in Markdown.
const WIDTH: usize = 120;

fn wrap(paragraph: &str) -> String {
    let (mut text, mut column) = (String::new(), 0);
    for word in paragraph.split_whitespace() {
        let width = word.chars().count();
        if column > 0 && column + 1 + width > WIDTH {
            text.push('\n');
            column = 0;
        } else if column > 0 {
            text.push(' ');
            column += 1;
        }
        text.push_str(word);
        column += width;
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page() -> Page {
        let table = Table { head: vec!["a".into(), "b".into()], rows: vec![vec!["1".into(), "<2>".into()]] };
        let long = "word ".repeat(60);
        let section = Section {
            heading: "First & only".into(),
            paragraphs: vec![long],
            tables: vec![table],
            plots: Vec::new(),
        };
        Page { title: "Test".into(), sections: vec![section] }
    }

    #[test]
    fn markdown_has_tables_and_short_lines() {
        let text = page().markdown();
        assert!(text.contains("\n| a | b |\n|---|---|\n| 1 | <2> |\n"), "{text}");
        assert!(text.lines().all(|line| line.chars().count() <= WIDTH), "{text}");
        assert_eq!(text.matches("word").count(), 60);
    }

    #[test]
    fn the_first_table_of_a_page_is_read() {
        let text = format!(
            "# Page\n\n{}\n\n| other |\n|---|\n| 3 |\n",
            "| a | b, c |\n|---|---|\n| one | **0.26** (0.2, 0.3) |"
        );
        let table = Table::first_of(&text).unwrap();
        assert_eq!(
            (table.head, table.rows),
            (vec!["a".to_owned(), "b, c".into()], vec![vec!["one".to_owned(), "0.26 (0.2, 0.3)".into()]])
        );
        for broken in ["", "# Page", "| a |", "| a |\n|---|", "| a | b |\n|---|---|\n| 1 |"] {
            assert!(Table::first_of(broken).is_none(), "{broken}");
        }
    }

    #[test]
    fn html_is_escaped() {
        let text = page().html().unwrap();
        assert!(text.contains("<h2>First &amp; only</h2>") && text.contains("<td>&lt;2&gt;</td>"), "{text}");
    }
}
