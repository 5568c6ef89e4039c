//! The source of a case: with the attribute, and with `format!` in place of the attribute.

use std::ops::Range;

use super::written::{Binding, KeysForm, Written, WrittenKey, WrittenTemplate, WrittenValue};

impl Written {
    /// The function with `format!`. It returns the keys, with marks around their values, and its
    /// arguments.
    pub(super) fn reference(&self) -> String {
        let keys: String = self
            .keys
            .iter()
            .map(|key| format!("    {}\n", self.marked(key)))
            .collect();
        let body = format!(
            "    let mut seen_by_the_case = crate::support::Seen::new();\n{keys}    {}\n    Ok(seen_by_the_case)\n",
            self.sees()
        );
        format!("{}{}", self.function("", &body), self.call())
    }

    /// The function with the attribute, which reports whether it holds `keys`, and the range of the
    /// attribute in the source.
    ///
    /// Without keys the body is not expected to run, and does not use the guard, which an attribute
    /// that is refused does not define.
    pub(super) fn locked(&self, keys: &[String]) -> (String, Range<usize>) {
        let attribute = self.attribute();
        let guard = self.guard.as_ref().filter(|_| !keys.is_empty());
        let guard = guard
            .map(|guard| format!("    seen_by_the_case.push(crate::support::guarded({guard}));\n"));
        let body = format!(
            "    let mut seen_by_the_case = crate::support::held(KEYS);\n{}    {}\n    Ok(seen_by_the_case)\n",
            guard.unwrap_or_default(),
            self.sees()
        );
        let source = format!(
            "pub const KEYS: &[&str] = &{keys:?};\n{}{}",
            self.function(&attribute, &body),
            self.call()
        );
        let start = source.find(&attribute).unwrap_or_default();
        (source, start..start + attribute.len())
    }

    fn attribute(&self) -> String {
        let keys: Vec<String> = self.keys.iter().map(WrittenKey::in_the_attribute).collect();
        let key = match (self.form, &self.keys[..]) {
            (
                KeysForm::One,
                [
                    WrittenKey::Template(WrittenTemplate {
                        values: Some(_), ..
                    }),
                ],
            ) => keys.concat(),
            (KeysForm::One, _) => format!("key = {}", keys.concat()),
            (KeysForm::Several, _) => format!("keys({})", keys.join(", ")),
            (KeysForm::Expr, _) => {
                let keys: String = keys
                    .iter()
                    .map(|key| format!("String::from({key}), "))
                    .collect();
                format!("keys = Vec::<String>::from([{keys}])")
            }
        };
        let global = self.global.then(|| "global".to_owned());
        let guard = self.guard.as_ref().map(|guard| format!("held = {guard}"));
        let runtime = self.runtime.map(|path| format!("crate = {path}"));
        let mut arguments: Vec<String> = global.into_iter().chain(guard).chain(runtime).collect();
        arguments.insert(if self.key_last { arguments.len() } else { 0 }, key);
        format!("#[distributed_lock({})]", arguments.join(", "))
    }

    fn function(&self, attribute: &str, body: &str) -> String {
        let receiver = self
            .receiver
            .map(|receiver| format!("{receiver}, "))
            .unwrap_or_default();
        let function = format!(
            "{attribute}\npub async fn {}({receiver}{}) -> Result<crate::support::Seen, crate::support::Failure> {{\n{body}}}\n",
            self.function,
            self.parameters.join(", ")
        );
        let import = if attribute.is_empty() {
            ""
        } else {
            "use lock_runtime::distributed_lock;\n"
        };
        let structs = &self.structs;
        let function = match self.receiver {
            None => function,
            Some(_) => format!("crate::support::owner!();\nimpl Owner {{\n{function}}}\n"),
        };
        format!("{import}use crate::support::{{COUNT, LIMIT, Path}};\n{structs}{function}")
    }

    /// A function without arguments that calls the function of the case.
    fn call(&self) -> String {
        let given = self.given.join(", ");
        let function = &self.function;
        let receiver = match self.receiver {
            None => "",
            Some("self: Box<Self>") => "Box::new(Owner(7)).",
            Some("self: std::sync::Arc<Self>") => "std::sync::Arc::new(Owner(7)).",
            Some(_) => "Owner(7).",
        };
        format!(
            "pub fn call_of_the_case() -> crate::support::Call {{\n    Box::pin(async {{ {receiver}{function}({given}).await }})\n}}\n"
        )
    }

    /// Statements that record the arguments as the body sees them. A different value means that the
    /// names were confused.
    fn sees(&self) -> String {
        let names = self.bindings.iter().map(|binding| &binding.name);
        names
            .map(|name| format!("seen_by_the_case.push(('a', format!(\"{{:?}}\", {name})));"))
            .collect::<Vec<_>>()
            .join("\n    ")
    }

    /// A statement that records the key as `format!` writes it.
    fn marked(&self, key: &WrittenKey) -> String {
        let template = match key {
            WrittenKey::Expr(expr) => {
                return format!("seen_by_the_case.push(('e', String::from({expr})));");
            }
            WrittenKey::Literal(_) => return String::new(),
            WrittenKey::Template(template) => template,
        };
        let values = template.values.as_deref().unwrap_or_default();
        let scrutinee: String = values
            .iter()
            .map(|value| format!("&({}), ", value.expr))
            .collect();
        let bound: String = (0..values.len())
            .map(|number| format!("reference_value_{number}, "))
            .collect();
        let shadows: String = self
            .bindings
            .iter()
            .map(|Binding { name, .. }| format!("let {name} = Marked(&{name}); "))
            .collect();
        let arguments: String = values
            .iter()
            .zip(0..)
            .map(|(WrittenValue { name, .. }, number)| match name {
                Some(name) => format!(", {name} = Marked(reference_value_{number})"),
                None => format!(", Marked(reference_value_{number})"),
            })
            .collect();
        format!(
            "match ({scrutinee}) {{ ({bound}) => {{ use crate::support::Marked; {shadows}seen_by_the_case.push(('k', format!({}{arguments}))); }} }}",
            template.literal
        )
    }
}

impl WrittenKey {
    fn in_the_attribute(&self) -> String {
        let template = match self {
            Self::Expr(expr) => return expr.clone(),
            Self::Literal(literal) => return (*literal).into(),
            Self::Template(template) => template,
        };
        let Some(values) = &template.values else {
            return template.literal.clone();
        };
        let values = values
            .iter()
            .map(|WrittenValue { name, expr, .. }| match name {
                Some(name) => format!(", {name} = {expr}"),
                None => format!(", {expr}"),
            });
        format!("key({}{})", template.literal, values.collect::<String>())
    }
}
