({
  init: config => ({ tab: 0, saved: false, submitted: false,
    values: Object.fromEntries(config.tabs.flatMap(tab => tab.options.map(option => [option.id, option.value]))) }),
  view: (state, kit, config) => [
    kit.bar(config.tabs.map((tab, place) => kit.button(`tab${place}`, tab.name, kit.go(() => { state.tab = place; }),
      { role: 'tab', 'aria-selected': String(state.tab === place) }))),
    ...config.tabs[state.tab].options.map(option => kit.bar(option.kind === 'switch'
      ? kit.tick(option.id, option.name, state.values[option.id] === 'on',
        value => { state.values[option.id] = value ? 'on' : 'off'; })
      : kit.select(option.id, option.name, option.choices, state.values[option.id],
        value => { state.values[option.id] = value; }))),
    kit.bar(kit.button('save', 'Save', kit.go(() => { state.submitted = true; }), { class: 'main' }),
      kit.button('reset', 'Reset', kit.set(() => {
        for (const tab of config.tabs) for (const option of tab.options) state.values[option.id] = option.value;
      })))],
  goals: (state, config) => {
    const wanted = Object.fromEntries(config.wanted.map(want => [want.id, want.value]));
    const rest = config.tabs.flatMap(tab => tab.options).filter(option => !(option.id in wanted));
    return [...config.wanted.map(want => state.submitted && state.values[want.id] === want.value),
      rest.every(option => state.values[option.id] === option.value)];
  },
})
