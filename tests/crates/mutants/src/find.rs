//! The mutants of a file: operators, negations, guards and arms of `match`, and bodies.

use std::{cmp::Reverse, collections::HashSet, fmt, ops::Range, str::FromStr};

use anyhow::{Context as _, Error, Result};
use proc_macro2::Span;
use quote::ToTokens as _;
use syn::{
    Arm, Attribute, BinOp, Block, ConstParam, Expr, ExprBinary, ExprConst, ExprLet, ExprMatch,
    ExprRepeat, ExprUnary, GenericArgument, ImplItem, Item, ItemFn, Pat, PatGuard, PathArguments,
    ReturnType, Signature, Type, TypeArray, UnOp,
    spanned::Spanned as _,
    visit::{self, Visit},
};

/// A change of the program that tests should notice.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Mutant {
    pub(crate) file: String,
    pub(crate) line: usize,
    pub(crate) function: String,
    pub(crate) what: String,
}

impl Mutant {
    /// Returns whether this is the same change as another one, at any place of the function.
    fn is_like(&self, other: &Self) -> bool {
        let rest = self.what.strip_prefix(&other.what);
        (&self.file, &self.function) == (&other.file, &other.function)
            && rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(", number "))
    }
}

/// The fields, with tabs between them.
impl fmt::Display for Mutant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            file,
            line,
            function,
            what,
        } = self;
        write!(f, "{file}\t{line}\t{function}\t{what}")
    }
}

impl FromStr for Mutant {
    type Err = Error;

    fn from_str(line: &str) -> Result<Self> {
        let mut fields = line.split('\t');
        let mut next = || fields.next().with_context(|| format!("a mutant: {line}"));
        Ok(Self {
            file: next()?.to_owned(),
            line: next()?.parse()?,
            function: next()?.to_owned(),
            what: next()?.to_owned(),
        })
    }
}

/// A place of the text and the mutants there, with their replacements.
struct Place {
    start: usize,
    end: usize,
    form: Form,
    mutants: Vec<(usize, String)>,
}

enum Form {
    /// Another expression in place of this one.
    Expression,
    /// A statement before the others of a body.
    Body,
    /// A further condition of an arm.
    Arm,
}

/// A text with the switches of its mutants.
pub(crate) struct Planted {
    pub(crate) text: String,
    pub(crate) switches: Vec<Switch>,
}

/// The place of the switch of a mutant.
pub(crate) struct Switch {
    pub(crate) range: Range<usize>,
    pub(crate) mutant: usize,
}

/// Adds the mutants of a file to `mutants`, whose indices are their numbers, and plants those that
/// are not refused.
pub(crate) fn plant(
    file: &str,
    source: &str,
    mutants: &mut Vec<Mutant>,
    refused: &HashSet<Mutant>,
) -> syn::Result<Planted> {
    let mut finder = Finder {
        file,
        source,
        refused,
        functions: Vec::new(),
        places: Vec::new(),
        mutants,
    };
    finder.visit_file(&syn::parse_file(source)?);
    let mut places = finder.places;
    // An outer place comes before those within it.
    places.sort_by_key(|place| (place.start, Reverse(place.end)));
    let switch = if file.starts_with("lock-tower") {
        "::lock_runtime::mutants::on"
    } else {
        "crate::mutants::on"
    };
    let mut planted = Planted {
        text: String::new(),
        switches: Vec::new(),
    };
    let mut rest = places.as_slice();
    planted.copy(source, 0..source.len(), &mut rest, switch);
    assert!(rest.is_empty(), "{file}: places overlap");
    Ok(planted)
}

impl Planted {
    fn copy(&mut self, source: &str, range: Range<usize>, places: &mut &[Place], switch: &str) {
        let mut at = range.start;
        while let Some((place, rest)) = places.split_first()
            && place.end <= range.end
        {
            *places = rest;
            self.text.push_str(&source[at..place.start]);
            at = place.end;
            let is_expression = matches!(place.form, Form::Expression);
            self.text.push_str(if is_expression { "(" } else { "" });
            for (mutant, with) in &place.mutants {
                let start = self.text.len();
                self.text.push_str(&match place.form {
                    Form::Expression => format!("if {switch}({mutant}) {{ {with} }} else "),
                    Form::Body => format!(" if {switch}({mutant}) {{ {with} }}"),
                    Form::Arm => format!(" if !{switch}({mutant})"),
                });
                self.switches.push(Switch {
                    range: start..self.text.len(),
                    mutant: *mutant,
                });
            }
            if is_expression {
                self.text.push('{');
                self.copy(source, place.start..place.end, places, switch);
                self.text.push_str("})");
            }
        }
        self.text.push_str(&source[at..range.end]);
    }
}

struct Finder<'a> {
    file: &'a str,
    source: &'a str,
    refused: &'a HashSet<Mutant>,
    functions: Vec<String>,
    places: Vec<Place>,
    mutants: &'a mut Vec<Mutant>,
}

impl Finder<'_> {
    fn text(&self, span: Span) -> &str {
        &self.source[span.byte_range()]
    }

    /// The beginning of a text, in one line.
    fn short(&self, span: Span) -> String {
        let words: Vec<_> = self.text(span).split_whitespace().collect();
        words.join(" ").chars().take(70).collect()
    }

    /// Adds the mutants of a place: what they are, and the replacement.
    fn add(&mut self, line: usize, range: Range<usize>, form: Form, new: Vec<(String, String)>) {
        let mut mutants = Vec::new();
        for (what, with) in new {
            let number = self.mutants.len();
            let mut mutant = Mutant {
                file: self.file.to_owned(),
                line,
                function: self.functions.last().cloned().unwrap_or_default(),
                what,
            };
            let equal = (self.mutants.iter()).filter(|it| it.is_like(&mutant));
            let equal = equal.count();
            if equal > 0 {
                mutant.what += &format!(", number {}", equal + 1);
            }
            self.mutants.push(mutant);
            if !self.refused.contains(&self.mutants[number]) {
                mutants.push((number, with));
            }
        }
        if !mutants.is_empty() {
            self.places.push(Place {
                start: range.start,
                end: range.end,
                form,
                mutants,
            });
        }
    }

    fn function(&mut self, signature: &Signature, block: &Block) {
        if signature.constness.is_some() {
            return;
        }
        self.functions.push(signature.ident.to_string());
        if !block.stmts.is_empty() {
            let outputs = match &signature.output {
                ReturnType::Default => vec!["()".to_owned()],
                ReturnType::Type(_, output) => simple_values(output),
            };
            let new = (outputs.into_iter())
                .map(|value| (format!("returns {value}"), format!("return {value};")))
                .collect();
            let at = block.brace_token.span.open().byte_range().end;
            let line = signature.ident.span().start().line;
            self.add(line, at..at, Form::Body, new);
        }
        self.visit_block(block);
        self.functions.pop();
    }
}

/// Values that exist for each type of this kind.
fn simple_values(of: &Type) -> Vec<String> {
    let texts = |list: &[&str]| list.iter().map(|&value| value.to_owned()).collect();
    match of {
        Type::Tuple(tuple) if tuple.elems.is_empty() => texts(&["()"]),
        Type::Path(path) => {
            let Some(last) = path.path.segments.last() else {
                return Vec::new();
            };
            let inner = match &last.arguments {
                PathArguments::AngleBracketed(list) => {
                    (list.args.iter()).find_map(|argument| match argument {
                        GenericArgument::Type(inner) => Some(simple_values(inner)),
                        _ => None,
                    })
                }
                _ => None,
            };
            let inner = inner.unwrap_or_default();
            match last.ident.to_string().as_str() {
                "bool" => texts(&["true", "false"]),
                "u8" | "u16" | "u32" | "u64" | "u128" | "usize" | "i32" | "i64" => {
                    texts(&["0", "1"])
                }
                "Option" => std::iter::once("None".to_owned())
                    .chain(inner.first().map(|value| format!("Some({value})")))
                    .collect(),
                "Result" => inner.iter().map(|value| format!("Ok({value})")).collect(),
                "Vec" => texts(&["Vec::new()"]),
                "String" => texts(&["String::new()"]),
                "Duration" => texts(&["Default::default()"]),
                _ => Vec::new(),
            }
        }
        _ => Vec::new(),
    }
}

fn other_operators(operator: BinOp) -> &'static [&'static str] {
    match operator {
        BinOp::And(_) => &["||"],
        BinOp::Or(_) => &["&&"],
        BinOp::Eq(_) => &["!="],
        BinOp::Ne(_) => &["=="],
        BinOp::Lt(_) => &["<=", ">="],
        BinOp::Gt(_) => &[">=", "<="],
        BinOp::Le(_) => &["<", ">"],
        BinOp::Ge(_) => &[">", "<"],
        BinOp::Add(_) => &["-"],
        BinOp::Sub(_) | BinOp::Mul(_) | BinOp::Rem(_) => &["+"],
        BinOp::Div(_) => &["*"],
        BinOp::AddAssign(_) => &["-="],
        BinOp::SubAssign(_) => &["+="],
        BinOp::BitAnd(_) => &["|"],
        BinOp::BitOr(_) => &["&"],
        _ => &[],
    }
}

/// Returns whether an expression binds names, which would not be in scope behind a switch.
fn binds(expression: &Expr) -> bool {
    struct Search(bool);
    impl Visit<'_> for Search {
        fn visit_expr_let(&mut self, _: &ExprLet) {
            self.0 = true;
        }
    }
    let mut search = Search(false);
    search.visit_expr(expression);
    search.0
}

fn is_of_tests(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        let text = attribute.meta.to_token_stream().to_string();
        let is_test = (attribute.path().segments.last()).is_some_and(|name| name.ident == "test");
        let is_condition = attribute.path().is_ident("cfg");
        is_test || is_condition && text.contains("test") && !text.contains("not")
    })
}

fn is_any(arm: &Arm) -> bool {
    let binds_all = matches!(&arm.pat, Pat::Ident(name) if name.subpat.is_none()
        && name.ident.to_string().starts_with(char::is_lowercase));
    binds_all || matches!(arm.pat, Pat::Wild(_))
}

impl<'ast> Visit<'ast> for Finder<'_> {
    fn visit_item(&mut self, item: &'ast Item) {
        let attributes = match item {
            Item::Fn(item) => &item.attrs,
            Item::Mod(item) => &item.attrs,
            Item::Impl(item) => {
                let of = item.trait_.as_ref();
                let of = of.and_then(|(path, _)| path.segments.last());
                if of.is_some_and(|name| ["Debug", "Display"].iter().any(|it| name.ident == it)) {
                    return;
                }
                &item.attrs
            }
            Item::Trait(item) => &item.attrs,
            _ => return,
        };
        if !is_of_tests(attributes) {
            visit::visit_item(self, item);
        }
    }

    fn visit_item_fn(&mut self, item: &'ast ItemFn) {
        self.function(&item.sig, &item.block);
    }

    fn visit_impl_item(&mut self, item: &'ast ImplItem) {
        if let ImplItem::Fn(item) = item
            && !is_of_tests(&item.attrs)
        {
            self.function(&item.sig, &item.block);
        }
    }

    fn visit_expr_binary(&mut self, binary: &'ast ExprBinary) {
        if !binds(&binary.left) && !binds(&binary.right) {
            let old = self.text(binary.op.span()).to_owned();
            let new = (other_operators(binary.op).iter())
                .map(|new| {
                    let (left, right) = (binary.left.span(), binary.right.span());
                    (
                        format!("`{old}` -> `{new}` in: {}", self.short(binary.span())),
                        format!("({}) {new} ({})", self.text(left), self.text(right)),
                    )
                })
                .collect();
            let line = binary.op.span().start().line;
            self.add(line, binary.span().byte_range(), Form::Expression, new);
        }
        visit::visit_expr_binary(self, binary);
    }

    fn visit_expr_unary(&mut self, unary: &'ast ExprUnary) {
        if matches!(unary.op, UnOp::Not(_)) && !binds(&unary.expr) {
            let new = vec![(
                format!("without ! in: {}", self.short(unary.span())),
                self.text(unary.expr.span()).to_owned(),
            )];
            let line = unary.op.span().start().line;
            self.add(line, unary.span().byte_range(), Form::Expression, new);
        }
        visit::visit_expr_unary(self, unary);
    }

    fn visit_expr_match(&mut self, expression: &'ast ExprMatch) {
        let others = expression.arms.iter().any(is_any);
        for arm in &expression.arms {
            let line = arm.pat.span().start().line;
            match &arm.pat {
                Pat::Guard(PatGuard { guard, .. }) if !binds(guard) => {
                    let short = self.short(guard.span());
                    let new = ["true", "false"]
                        .map(|value| (format!("guard `{short}` -> {value}"), value.to_owned()));
                    let range = guard.span().byte_range();
                    self.add(line, range, Form::Expression, new.into());
                }
                Pat::Guard(_) | Pat::Wild(_) | Pat::Ident(_) => {}
                pattern if others => {
                    let at = pattern.span().byte_range().end;
                    let what = format!("without arm `{}`", self.short(pattern.span()));
                    self.add(line, at..at, Form::Arm, vec![(what, String::new())]);
                }
                _ => {}
            }
        }
        visit::visit_expr_match(self, expression);
    }

    // Constants cannot ask a switch.
    fn visit_expr_repeat(&mut self, _: &'ast ExprRepeat) {}
    fn visit_type_array(&mut self, _: &'ast TypeArray) {}
    fn visit_expr_const(&mut self, _: &'ast ExprConst) {}
    fn visit_const_param(&mut self, _: &'ast ConstParam) {}
    fn visit_generic_argument(&mut self, _: &'ast GenericArgument) {}
}
