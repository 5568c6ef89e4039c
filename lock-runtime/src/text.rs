//! Texts for operators, on terminals and on pages.

use std::time::Duration;

/// Escapes control characters and those that are invisible or change the direction of the text:
/// names come from other programs.
pub fn visible(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    text.chars().for_each(|c| push_visible(c, &mut shown));
    shown
}

pub(crate) fn push_visible(c: char, shown: &mut String) {
    let is_hidden = matches!(c, '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}'
        | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}');
    match c.is_control() || is_hidden {
        true => shown.extend(c.escape_unicode()),
        false => shown.push(c),
    }
}

/// Prints a duration to a tenth of a second below ten, and else to a second: `1.5s`, `2m 5s`.
pub fn brief(duration: Duration) -> String {
    match duration.as_secs() {
        0..10 => format!("{:.1}s", duration.as_secs_f64()),
        seconds => humantime::format_duration(Duration::from_secs(seconds)).to_string(),
    }
}
